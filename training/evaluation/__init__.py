"""What is looked at besides the loss: profiles along the depth, samples and their pictures, the Frechet distance.

Knows `system` only; `loop`, `tasks` and `report` may import it.
"""
