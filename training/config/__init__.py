"""What a user can set: one base for every training script, a small config per task, and how they are read and written.

Knows nothing else of `training`; everything but `system` may import it.
"""
