"""Which parameter goes into which bucket, and the flat bucket itself. No communication here.

Sending 400 small gradients costs 400 latencies; sending them in one flat tensor costs one. A bucket
is that flat tensor, with one view per parameter. Sizes and order follow torch's reducer
(``compute_bucket_assignment_by_size`` and ``initialize_bucket_views`` in
``torch/csrc/distributed/c10d/reducer.cpp``), because the order of the numbers inside a bucket
decides the order in which a ring all-reduce adds them up, and so the last bit of every gradient.
"""

from collections.abc import Collection, Sequence

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

    A bucket holds one dtype on one device and closes once it has reached its cap in bytes, so it
    may exceed the cap by part of one parameter. ``caps=None`` means no limit: one bucket per dtype
    and device. A parameter whose gradient is sparse (``sparse[i]``) travels alone. Buckets come in
    the order in which they were closed, the unfilled ones last.
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
        self.lacks_gradient = False  # whether pack() found a parameter without a gradient

    def pack(self, divisor: float = 1, reciprocal: bool = True) -> None:
        """Copy every gradient into the flat tensor, divided by ``divisor``; a missing one is zero.

        ``reciprocal`` multiplies by ``1 / divisor``, as torch's reducer does: for 3 ranks that is
        not the same to the bit as dividing.
        """
        with torch.no_grad():
            torch._foreach_copy_(self.views, self._grads_or_zeros())
            if reciprocal and divisor != 1:
                self.flat.mul_(1.0 / divisor)
            elif divisor != 1:
                self.flat.div_(divisor)

    def unpack(self, leave: Collection[int] = ()) -> None:
        """Copy the flat tensor back into the gradients, creating those that are missing.

        Parameters whose index is in ``leave`` keep the gradient they have.
        """
        with torch.no_grad():
            params, views = self.params, self.views
            if leave:
                kept = [k for k, i in enumerate(self.indices) if i not in leave]
                params, views = [params[k] for k in kept], [views[k] for k in kept]
            if not params:
                return
            grads = [p.grad for p in params]
            if any(g is None for g in grads):
                for p in params:
                    p.grad = torch.empty_like(p) if p.grad is None else p.grad
                grads = [p.grad for p in params]
            torch._foreach_copy_(grads, views)

    def without_gradients(self) -> "Bucket":
        """A bucket of the same shape whose parameters have no gradients: it sends zeros."""
        return type(self)(self.indices, [torch.empty_like(p) for p in self.params], self.names)

    def empty_among(self, indices: Collection[int]) -> set[int]:
        """Those of ``indices`` that have no gradient yet and for which the flat tensor holds
        zeros."""
        members = zip(self.indices, self.params, self.views, strict=True)
        return {i for i, p, v in members if i in indices and p.grad is None and not v.any()}

    def _grads_or_zeros(self) -> list[Tensor]:
        grads = [p.grad for p in self.params]
        self.lacks_gradient = any(g is None for g in grads)
        if self.lacks_gradient:
            grads = [
                torch.zeros_like(v) if g is None else g
                for g, v in zip(grads, self.views, strict=True)
            ]
        return grads

    @property
    def nbytes(self) -> int:
        """Size of the flat tensor in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def __repr__(self) -> str:
        dtype = str(self.flat.dtype).removeprefix("torch.")
        return (
            f"Bucket({self.flat.numel()} x {dtype}, {self.nbytes} bytes: {', '.join(self.names)})"
        )


class GradientBucket(Bucket):
    """A bucket whose views *are* the gradients: ``p.grad`` lies in the flat tensor, nothing is
    copied (``gradient_as_bucket_view=True``)."""

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor], names: Sequence[str]):
        super().__init__(indices, params, names)
        with torch.no_grad():
            for p, view in zip(self.params, self.views, strict=True):
                if p.grad is not None:
                    view.copy_(p.grad)
                    p.grad = view

    def pack(self, divisor: float = 1, reciprocal: bool = True) -> None:
        strangers = [
            k for k, p in enumerate(self.params) if p.grad is None or p.grad is not self.views[k]
        ]
        if len(strangers) == len(self.params):
            super().pack(divisor, reciprocal)
        else:
            self._pack_some(strangers, divisor, reciprocal)
        for k in strangers:
            if self.params[k].grad is not None:
                self.params[k].grad = self.views[k]

    def _pack_some(self, strangers: list[int], divisor: float, reciprocal: bool) -> None:
        with torch.no_grad():
            for k in strangers:
                grad = self.params[k].grad
                self.views[k].zero_() if grad is None else self.views[k].copy_(grad)
            if not (reciprocal and strangers):
                self.flat.div_(divisor)
                return
            # torch's reducer divides what already lies in the bucket and multiplies what it copies
            for k, view in enumerate(self.views):
                view.mul_(1.0 / divisor) if k in strangers else view.div_(divisor)

    def unpack(self, leave: Collection[int] = ()) -> None:
        for i, p, view in zip(self.indices, self.params, self.views, strict=True):
            if p.grad is None and i not in leave:
                p.grad = view


class SparseBucket(Bucket):
    """The bucket of one parameter with sparse gradients: ``flat`` is the sparse tensor itself,
    shape as the parameter, and only the rows that some rank has travel."""

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor], names: Sequence[str]):
        self.indices, self.params, self.names = list(indices), list(params), list(names)
        self.offsets, self.views, self.pending, self.lacks_gradient = [0], [], 1, False
        self.flat = self._no_rows()

    def _no_rows(self) -> Tensor:
        p = self.params[0]
        rows = torch.empty(1, 0, dtype=torch.long, device=p.device)
        values = torch.empty(0, *p.shape[1:], dtype=p.dtype, device=p.device)
        return torch.sparse_coo_tensor(rows, values, p.shape, check_invariants=False)

    def pack(self, divisor: float = 1, reciprocal: bool = True) -> None:
        grad = self.params[0].grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                f"{self.names[0]} belongs to a layer with sparse=True, but its gradient is dense; "
                "set sparse=False where the layer is made, and wrap the model again."
            )
        with torch.no_grad():
            self.flat = self._no_rows() if grad is None else grad.coalesce() / divisor

    def unpack(self, leave: Collection[int] = ()) -> None:
        if self.indices[0] not in leave:
            self.params[0].grad = self.flat

    def empty_among(self, indices: Collection[int]) -> set[int]:
        nothing = self.params[0].grad is None and self.flat._nnz() == 0
        return {self.indices[0]} if nothing else set()


def view_like(param: Tensor, flat: Tensor, offset: int) -> Tensor:
    """The part of ``flat`` from ``offset`` on, in the shape of ``param`` and, where it is dense,
    with its strides, so that copying a gradient is one straight pass over memory."""
    # empty_like keeps strides exactly when a tensor has neither gaps nor overlaps
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return flat.as_strided(param.shape, param.stride(), offset)
    return flat[offset : offset + param.numel()].view(param.shape)
