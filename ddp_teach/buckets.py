"""Which parameter goes into which bucket, and the flat bucket itself. No communication here.

Sending 400 small gradients costs 400 latencies; sending them in one flat tensor costs one. A bucket
is that flat tensor, with one view per parameter. Sizes and order follow torch's reducer
(``compute_bucket_assignment_by_size`` and ``initialize_bucket_views`` in
``torch/csrc/distributed/c10d/reducer.cpp``), because the order of the numbers inside a bucket
decides the order in which a ring all-reduce adds them up, and so the last bit of every gradient.
"""

import cmath
import sys
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = MIB  # a small first bucket lets the first all-reduce start early
LARGE_BYTES = 128 * 1024  # above, one pass over each gradient beats few calls over many


def bucket_caps(
    cap_mb: float | None = None, cap_mb_list: Sequence[float] | None = None
) -> list[int]:
    """Turn torch's two bucket-size arguments into a list of caps in bytes, first bucket first.

    The last cap holds for all further buckets. Without arguments: 1 MiB, then 25 MiB.
    """
    if cap_mb_list:
        return [int(mb * MIB) for mb in cap_mb_list]
    if cap_mb is None:
        return [FIRST_CAP_BYTES, DEFAULT_CAP_MB * MIB]
    return [int(cap_mb * MIB)]


def assign_buckets(
    params: Sequence[Tensor], caps: Sequence[int] | None, sparse: Sequence[bool] = ()
) -> list[list[int]]:
    """Cut ``params``, in the order given, into buckets; returns positions in ``params``.

    A bucket holds one dtype on one device and closes once it has reached its cap in bytes, so it
    may exceed the cap by part of one parameter. ``caps=None`` means no limit: one bucket per dtype
    and device. A parameter whose gradient is sparse (``sparse[i]``) travels alone. Buckets come in
    the order in which they were closed, the unfilled ones last.
    """
    closed: list[list[int]] = []
    filling: dict[tuple, list[int]] = {}  # per dtype and device: the bucket now being filled,
    filled_bytes: dict[tuple, int] = {}  # its size,
    position: dict[tuple, int] = {}  # and how many were closed before it
    for i, param in enumerate(params):
        if sparse and sparse[i]:
            closed.append([i])
            continue
        kind = (param.dtype, param.device)
        filling.setdefault(kind, []).append(i)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + param.numel() * param.element_size()
        nth = position.setdefault(kind, 0)
        if caps is not None and filled_bytes[kind] >= caps[min(nth, len(caps) - 1)]:
            closed.append(filling.pop(kind))
            filled_bytes[kind], position[kind] = 0, nth + 1
    return closed + list(filling.values())


class Bucket:
    """One flat tensor that carries the gradients of several parameters through one all-reduce.

    ``indices`` are the parameters' places in the model, ``names`` and ``params`` belong to them,
    ``flat`` has shape ``[numel]`` and ``nbytes`` bytes, and ``views[k]`` is the part of ``flat``
    that holds the gradient of ``params[k]``, in that parameter's own shape and memory layout.
    """

    filler = 0.0  # what is sent where a parameter has no gradient

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor], names: Sequence[str]):
        self.indices, self.params, self.names = list(indices), list(params), list(names)
        *self.offsets, self.numel = accumulate((p.numel() for p in self.params), initial=0)
        self.nbytes = self.numel * self.params[0].element_size()
        self.large = self.nbytes > LARGE_BYTES * len(self.params)
        self.pending = 0  # gradients still to come in this backward pass
        self.has_gaps = False  # whether pack() found a parameter without a gradient
        self.gives_views = False  # whether the views will become the gradients of this pass
        self.work: Any = None  # the all-reduce now running; has a method wait()
        self.number = 0  # counts all buckets that were sent over its group, this one included
        self._allocate()

    def _allocate(self) -> None:
        members = zip(self.params, self.offsets, strict=True)
        self.layouts = [(p.shape, strides_in_bucket(p), offset) for p, offset in members]
        self._take_memory()
        self._make_views()

    def _take_memory(self) -> None:
        self.flat: Any = None  # so that the memory it had can be used again at once
        self.flat = self.params[0].new_empty(self.numel, requires_grad=False)

    def _make_views(self) -> None:
        self.views: Any = [self.flat.as_strided(*layout) for layout in self.layouts]

    def _take_back(self) -> None:
        """Have memory that nobody else sees: gradients given away are the user's, who may zero them
        while an all-reduce still runs. Where all were dropped, as zero_grad() does, it is free."""
        self.views = None
        # An accelerator's allocator is as fast, and knows which streams still read what was freed.
        if is_held_elsewhere(self.flat) or not self.flat.is_cpu:
            self._take_memory()
        self._make_views()

    def is_outdated(self) -> bool:
        """Whether some parameter was moved or converted since the bucket was made."""
        dtype, device = self.flat.dtype, self.flat.device
        return any(p.dtype != dtype or p.device != device for p in self.params)

    def expect(self) -> None:
        """A backward pass begins: every gradient is still to come."""
        self.pending, self.has_gaps, self.work = len(self.params), False, None
        # A new gradient belongs to nobody yet, so a view can take its place and need no copying
        # back; a gradient that is there already may be held by others and is written in place.
        may_replace = self.large and not torch.is_grad_enabled()
        self.gives_views = may_replace and all(p.grad is None for p in self.params)

    def pack(self, divisor: float = 1, reciprocal: bool = True) -> None:
        """Copy every gradient into the flat tensor, divided by ``divisor``; a missing one is
        ``filler``.

        ``reciprocal`` multiplies by ``1 / divisor``, as torch's reducer does: for 3 ranks that is
        not the same to the bit as dividing. Call it with gradients switched off.
        """
        if self.large:
            self._take_back()
        grads = [p.grad for p in self.params]
        self.has_gaps = any(g is None for g in grads)
        if self.has_gaps:
            pairs = zip(grads, self.views, strict=True)
            grads = [torch.full_like(v, self.filler) if g is None else g for g, v in pairs]
        if self.large and reciprocal:
            for grad, view in zip(grads, self.views, strict=True):
                copy_divided(view, grad, divisor)
            return
        copy_all(self.views, grads)
        if divisor != 1 and reciprocal:
            self.flat.mul_(1.0 / divisor)
        elif divisor != 1:
            divide_parts(self.flat, divisor)

    def unpack(self, leave: Collection[int] = ()) -> None:
        """Make the flat tensor's contents the gradients, except for indices in ``leave``. Call it
        with gradients switched off."""
        grads, views = [], []
        for i, p, view in zip(self.indices, self.params, self.views, strict=True):
            if i in leave:
                continue
            if self.gives_views:
                p.grad = view
            elif p.grad is None:
                p.grad = view.clone()
            else:
                grads.append(p.grad)
                views.append(view)
        if grads:
            copy_all(grads, views)

    def filled(self, filler: float) -> "Bucket":
        """A bucket of the same shape whose parameters have no gradients: it sends ``filler``."""
        twin = type(self)(self.indices, [torch.empty_like(p) for p in self.params], self.names)
        twin.filler = filler
        return twin

    def begins_with_nan(self) -> bool:
        """Whether the first number in the flat tensor is not a number."""
        return cmath.isnan(self.flat[0].item())

    def empty_among(self, indices: Collection[int]) -> set[int]:
        """Those of ``indices`` that have no gradient and for which the flat tensor holds zeros."""
        members = zip(self.indices, self.params, self.views, strict=True)
        return {i for i, p, v in members if i in indices and p.grad is None and not v.any()}

    def holds_gradients(self) -> bool:
        """Whether some gradient lies in the flat tensor while it travels."""
        return False

    def __repr__(self) -> str:
        size = f"{self.numel} x {str(self.flat.dtype).removeprefix('torch.')}"
        return f"Bucket({size}, {self.nbytes} bytes: {', '.join(self.names)})"


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything but ``tensor`` has its memory: a view of it, an array, another process."""
    shared = tensor.is_cpu and tensor.is_shared()
    return shared or references(tensor) > references(torch.empty(0))


def references(tensor: Tensor) -> int:
    """How many objects refer to the memory of ``tensor``; itself and torch's own are counted."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of ``sources`` over the one of ``targets`` at its place."""
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:  # it takes no conjugate tensors, as gradients of complex numbers may be
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def copy_divided(target: Tensor, source: Tensor, divisor: float) -> None:
    """Copy ``source``, multiplied by ``1 / divisor``, over ``target``."""
    if source.shape != target.shape:  # torch would make the target larger, outside of its bucket
        raise RuntimeError(f"it has shape {list(source.shape)}, its place {list(target.shape)}")
    torch.mul(source, 1.0 / divisor, out=target)


def divide_parts(tensor: Tensor, divisor: float) -> None:
    """Divide in place, the real and the imaginary part each by itself, as torch does there."""
    (torch.view_as_real(tensor) if tensor.is_complex() else tensor).div_(divisor)


def strides_in_bucket(param: Tensor) -> tuple[int, ...]:
    """Those of ``param``, where it is dense, so that copying a gradient is one straight pass over
    memory; else those of a new tensor of its shape."""
    # empty_like keeps strides exactly when a tensor has neither gaps nor overlaps
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()
