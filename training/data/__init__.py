"""Data sets, their loaders, and what makes latents and embeddings of clips and captions.

Knows `config` and `system`; `loop`, `tasks` and the runnable modules may import it.
"""
