"""From the results of runs to numbers (`summary`, `sweep`) and to pages: an ordered list of panels (`write.PANELS`).

Knows `loop` for what runs leave behind, and `evaluation` for pictures; only `compare` imports it.
"""
