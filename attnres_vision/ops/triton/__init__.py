"""Depth attention in Triton: launch.py has the interface of eager.py. Imported only when a kernel is to run."""
