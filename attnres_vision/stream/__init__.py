"""The residual stream as a type, and its readers: what a layer reads of the outputs of the layers before it.

It imports `attnres_vision.ops` and `attnres_vision.config`, and nothing above: no model and no hook.
"""

from attnres_vision.stream.reader import DepthAttention
from attnres_vision.stream.stream import DepthStream

__all__ = ["DepthAttention", "DepthStream"]
