"""What is trained: image classification and video diffusion, each with its models, loss and scores.

Knows everything below, not `report`; the runnable modules may import it.
"""
