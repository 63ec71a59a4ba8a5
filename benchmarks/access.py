"""Bytes that depth attention moves, counted while it runs: Triton kernels in the interpreter, torch's ops at dispatch.

Of a kernel, every lane of a `tl.load` or `tl.store` that is not masked off counts. *Requested* are all of them. *First
touch* are those that a perfect cache would leave: a byte counts once per launch, and not at all where the launch itself
has written it before. A torch op counts its inputs and its outputs once; views and allocations are free.

TRITON_INTERPRET=1 must be set before this module is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "set_")
FILLS = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full")
OWN_NAMESPACE = "attnres_vision"


@dataclasses.dataclass
class Access:
    """Bytes of one argument of one launch, or of one torch op: requested and first touch."""

    loaded: int = 0
    stored: int = 0
    first_loaded: int = 0
    first_stored: int = 0


@dataclasses.dataclass
class Launch:
    """One kernel launch: bytes by the name of the argument, e.g. "blocks" for all pointers of that tuple."""

    kernel: str
    arguments: dict[str, Access]
    atomics: int


@dataclasses.dataclass
class _Running:
    """A launch that is going on: the address ranges of its arguments, in order, and what has been touched so far."""

    names: list[str]
    starts: np.ndarray
    ends: np.ndarray
    touched: dict[tuple[str, int], list[tuple[np.ndarray, bool]]] = dataclasses.field(default_factory=dict)
    atomics: int = 0

    def touch(self, pointers: Any, mask: Any, is_store: bool) -> None:
        addresses, live = np.broadcast_arrays(pointers.data, mask.data)
        addresses = addresses[live.astype(bool)].astype(np.int64)
        if not addresses.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        index = int(np.searchsorted(self.starts, addresses.min(), side="right")) - 1
        if index < 0 or addresses.max() + size > self.ends[index]:
            raise RuntimeError(f"a kernel touched memory outside of its arguments, near {self.names[max(0, index)]!r}")
        self.touched.setdefault((self.names[index], size), []).append((addresses, is_store))

    def finish(self, kernel: str) -> Launch:
        result: dict[str, Access] = {}
        for (name, size), events in self.touched.items():
            addresses = np.concatenate([event[0] for event in events])
            is_store = np.concatenate([np.full(event[0].size, event[1]) for event in events])
            _, first = np.unique(addresses, return_index=True)
            entry = result.setdefault(name, Access())
            entry.loaded += size * int((~is_store).sum())
            entry.stored += size * int(is_store.sum())
            entry.first_loaded += size * int((~is_store[first]).sum())
            entry.first_stored += size * np.unique(addresses[is_store]).size
        return Launch(kernel, result, self.atomics)


class Recorder(TorchDispatchMode):
    """Everything that moved while it was entered (`with Recorder() as recorder`)."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.ops: dict[str, Access] = {}
        self._running: _Running | None = None
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside does not count: the layers of the host model."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Enter the mode and watch the interpreter."""
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
        cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

        def watched_load(own: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            if self._running is not None:
                self._running.touch(pointers, mask, is_store=False)
            return load(own, pointers, mask, *rest)

        def watched_store(own: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            if self._running is not None:
                self._running.touch(pointers, mask, is_store=True)
            return store(own, pointers, value, mask, *rest)

        def watched_atomic(original: Any) -> Any:
            def atomic(own: Any, *args: Any) -> Any:
                if self._running is not None:
                    self._running.atomics += 1
                return original(own, *args)

            return atomic

        def watched_call(own: Any, *args: Any, **kwargs: Any) -> Any:
            self._running = _ranges(own.arg_names, args, kwargs)
            try:
                with self.paused():
                    result = call(own, *args, **kwargs)
                self.launches.append(self._running.finish(own.fn.__name__))
            finally:
                self._running = None
            return result

        builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
        builder.create_atomic_cas, builder.create_atomic_rmw = watched_atomic(cas), watched_atomic(rmw)
        executor.__call__ = watched_call
        try:
            with self:
                yield self
        finally:
            builder.create_masked_load, builder.create_masked_store = load, store
            builder.create_atomic_cas, builder.create_atomic_rmw = cas, rmw
            executor.__call__ = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == OWN_NAMESPACE:
            with self:  # the ops inside of a custom operator count, the operator does not
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if self._paused or name in ALLOCATIONS:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = not func._schema.is_mutable and any(t.untyped_storage().data_ptr() in own for t in outputs)
        if not is_view:
            entry = self.ops.setdefault(name, Access())
            loaded = 0 if name in FILLS or name == "zero_" else sum(map(_bytes, inputs))
            stored = sum(map(_bytes, outputs))
            entry.loaded, entry.stored = entry.loaded + loaded, entry.stored + stored
            entry.first_loaded, entry.first_stored = entry.loaded, entry.stored
        return result


def _bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _ranges(arg_names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Running:
    """Address ranges of the tensors among a kernel's arguments, in the order of their addresses."""
    found: dict[int, tuple[int, str]] = {}

    def add(name: str, start: int, elements: int, element_size: int) -> None:
        end = start + elements * element_size
        before = found.get(start)  # the same tensor twice: the last pointer again, up to the bucket
        if before is None or before[0] < end:
            found[start] = (end, name if before is None else before[1])

    arguments = {**dict(zip(arg_names, args, strict=False)), **kwargs}
    for name, value in arguments.items():
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                add(name, tensor.data_ptr(), last + 1, tensor.element_size())
    if isinstance(arguments.get("entries"), Tensor) and "bounds" in arguments:
        for name, start, elements, element_size in _listed(arguments):
            add(name, start, elements, element_size)
    starts = sorted(found)
    ends, names = [found[start][0] for start in starts], [found[start][1] for start in starts]
    return _Running(names, np.array(starts), np.array(ends))


def _listed(arguments: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """What a kernel reaches through a source table: argument, address, elements, bytes of each."""
    tokens, rows, width = (arguments[name] for name in ("num_tokens", "num_rows", "D"))
    for kind, (start, stop) in enumerate(itertools.pairwise(arguments["bounds"])):
        for block, sample_stride, token_stride, target, _ in arguments["entries"][start:stop].tolist():
            last = (rows // tokens - 1) * sample_stride + (tokens - 1) * token_stride
            yield "blocks", block, last + width, arguments["blocks"][kind].element_size()
            grad = arguments["block_grads"][kind] if "block_grads" in arguments else None
            if grad is not None:
                yield "block_grads", target, rows * width, grad.element_size()
