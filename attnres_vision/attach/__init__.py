"""Putting readers on a model: reader tables, the plan, hooks, and what one does with an attached model.

It imports `attnres_vision.stream` and what is below. It knows no host library: those register their reader tables.
"""

from attnres_vision.attach.attach import attach, attnres_state_dict, detach, hosts, load_attnres_state_dict, readers

__all__ = ["attach", "attnres_state_dict", "detach", "hosts", "load_attnres_state_dict", "readers"]
