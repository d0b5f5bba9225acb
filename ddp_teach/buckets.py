"""Which parameter goes into which bucket, and the flat bucket itself. No communication here.

Sending 400 small gradients costs 400 latencies; sending them in one flat tensor costs one. A bucket
is that flat tensor, with one view per parameter. Sizes and order follow torch's reducer
(``compute_bucket_assignment_by_size`` and ``initialize_bucket_views`` in
``torch/csrc/distributed/c10d/reducer.cpp``), because the order of the numbers inside a bucket decides
the order in which a ring all-reduce adds them up, and so the last bit of every gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = MIB  # a small first bucket lets the first all-reduce start early


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

    A bucket holds one dtype on one device and closes once it has reached its cap in bytes, so it may
    exceed the cap by part of one parameter. ``caps=None`` means no limit: one bucket per dtype and
    device. A parameter whose gradient is sparse (``sparse[i]``) travels alone. Buckets come in the
    order in which they were closed, the unfilled ones last.
    """
    closed: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed_of_kind: dict[tuple[torch.dtype, torch.device], int] = {}
    for i, param in enumerate(params):
        if sparse and sparse[i]:
            closed.append([i])
            continue
        kind = (param.dtype, param.device)
        filling.setdefault(kind, []).append(i)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + param.numel() * param.element_size()
        nth = closed_of_kind.get(kind, 0)
        if caps is not None and filled_bytes[kind] >= caps[min(nth, len(caps) - 1)]:
            closed.append(filling.pop(kind))
            filled_bytes[kind] = 0
            closed_of_kind[kind] = nth + 1
    return closed + list(filling.values())


class Bucket:
    """One flat tensor that carries the gradients of several parameters through one all-reduce.

    ``indices`` are the parameters' places in the model, ``names`` and ``params`` belong to them,
    ``flat`` has shape ``[sum of numel]``, and ``views[k]`` is the part of ``flat`` that holds the
    gradient of ``params[k]``, in that parameter's own shape and memory layout.
    """

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor], names: Sequence[str]):
        self.indices, self.params, self.names = list(indices), list(params), list(names)
        numels = [p.numel() for p in self.params]
        self.offsets = [sum(numels[:k]) for k in range(len(numels))]
        first = self.params[0]
        self.flat = torch.zeros(sum(numels), dtype=first.dtype, device=first.device)
        self.views = [
            view_like(p, self.flat, o) for p, o in zip(self.params, self.offsets, strict=True)
        ]
        self.pending = len(self.params)  # gradients still missing in this backward pass

    def pack(self, scale: float = 1.0) -> None:
        """Copy every gradient into the flat tensor, times ``scale``; a missing gradient is zero."""
        with torch.no_grad():
            grads = [p.grad for p in self.params]
            if None in grads:
                pairs = zip(grads, self.views, strict=True)
                grads = [torch.zeros_like(v) if g is None else g for g, v in pairs]
            torch._foreach_copy_(self.views, grads)
            if scale != 1.0:
                self.flat.mul_(scale)

    def unpack(self) -> None:
        """Copy the flat tensor back into every parameter's gradient, creating it where missing."""
        with torch.no_grad():
            for p, view in zip(self.params, self.views, strict=True):
                if p.grad is None:
                    p.grad = torch.empty_like(p)
            torch._foreach_copy_([p.grad for p in self.params], self.views)

    @property
    def nbytes(self) -> int:
        """Size of the flat tensor in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def __repr__(self) -> str:
        dtype = str(self.flat.dtype).removeprefix("torch.")
        return (
            f"Bucket({self.flat.numel()} x {dtype}, {self.nbytes} bytes: {', '.join(self.names)})"
        )


def view_like(param: Tensor, flat: Tensor, offset: int) -> Tensor:
    """The part of ``flat`` from ``offset`` on, with the shape and, where it is dense, the strides of
    ``param``, so that copying a gradient is one straight pass over memory."""
    # empty_like keeps strides exactly when a tensor has neither gaps nor overlaps
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return flat.as_strided(param.shape, param.stride(), offset)
    return flat[offset : offset + param.numel()].view(param.shape)
