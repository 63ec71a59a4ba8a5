"""The comparison: runnable modules on top (`compare`, `image`, `video`, `encode`), rooms below them.

Each knows only what is below it: report and tasks, loop, evaluation and data, config and system (ARCHITECTURE.md).
"""
