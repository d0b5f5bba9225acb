"""Buckets of two special kinds: one whose views are the gradients, one for a sparse gradient."""

from collections.abc import Collection

import torch

from ddp_teach.buckets import Bucket, copy_divided, divide_parts


class GradientBucket(Bucket):
    """A bucket whose views *are* the gradients: ``p.grad`` lies in the flat tensor and nothing is
    copied (``gradient_as_bucket_view=True``)."""

    def _allocate(self) -> None:
        super()._allocate()
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad.detach())
                p.grad = view

    def expect(self) -> None:
        super().expect()
        self.gives_views = False
        start, size = self.flat.data_ptr(), self.flat.element_size()
        places = zip(self.views, self.offsets, strict=True)
        if any(v.numel() and v.data_ptr() != start + o * size for v, o in places):
            self._allocate()  # module.to(memory_format=...) has put the views' contents elsewhere

    def pack(self, divisor: float = 1, reciprocal: bool = True) -> None:
        self.has_gaps = any(p.grad is None for p in self.params)
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is None:
                view.fill_(self.filler)
            elif not reciprocal:
                divide_parts(view if p.grad is view else view.copy_(p.grad), divisor)
            # torch's reducer divides what already lies in the bucket and multiplies what it copies
            elif p.grad is view:
                view.div_(divisor)
            else:
                copy_divided(view, p.grad, divisor)
            p.grad = None if p.grad is None else view

    def unpack(self, leave: Collection[int] = ()) -> None:
        members = zip(self.indices, self.params, self.views, self.names, strict=True)
        for i, p, view, name in members:
            if p.grad is None and i not in leave:
                p.grad = view
            elif p.grad is not None and p.grad is not view:
                raise RuntimeError(
                    f"The gradient of {name} was replaced while it was being averaged. With "
                    "gradient_as_bucket_view=True a module can't be in two wrappers."
                )

    def holds_gradients(self) -> bool:
        return any(p.grad is view for p, view in zip(self.params, self.views, strict=True))


class SparseBucket(Bucket):
    """The bucket of one parameter with sparse gradients: ``flat`` is the sparse tensor itself, and
    only the rows that some rank has travel."""

    def _allocate(self) -> None:
        self.flat, self.views = torch.zeros_like(self.params[0], layout=torch.sparse_coo), []

    def pack(self, divisor: float = 1, reciprocal: bool = True) -> None:
        grad = self.params[0].grad
        self.has_gaps = grad is None
        if self.has_gaps:
            grad = torch.full_like(self.params[0], self.filler).to_sparse(1)
        elif not grad.is_sparse:
            raise RuntimeError(
                f"{self.names[0]} belongs to a layer with sparse=True but has a dense gradient; "
                "set sparse=False where the layer is made, and wrap the model again."
            )
        self.flat = grad.coalesce() / divisor

    def unpack(self, leave: Collection[int] = ()) -> None:
        if self.indices[0] not in leave:
            self.params[0].grad = self.flat

    def begins_with_nan(self) -> bool:
        return bool(self.flat.coalesce().values()[:1].isnan().any())

    def empty_among(self, indices: Collection[int]) -> set[int]:
        return set(self.indices) if self.has_gaps and self.flat._nnz() == 0 else set()
