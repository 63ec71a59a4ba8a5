"""The training loop for any task: processes, folder, metrics, checkpoints, optimiser, averages, memory and speed.

Knows `data`, `evaluation`, `config` and `system`; `tasks`, `report` and the runnable modules may import it.
"""
