"""The machine around a run: processes and signals, the seeds of every random stream, files on disk.

Knows nothing else of `training`, and no torch model; everything may import it.
"""
