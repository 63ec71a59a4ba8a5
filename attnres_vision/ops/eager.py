"""Placeholder until the analytic autograd function lands: the reference."""

from attnres_vision.ops.reference import depth_attention

__all__ = ["depth_attention"]
