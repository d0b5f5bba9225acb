"""Communication hooks: let the user decide what happens to a full bucket instead of an all-reduce.

Works with the hooks that torch ships (``torch.distributed.algorithms.ddp_comm_hooks``: all-reduce,
fp16 and bf16 compression, PowerSGD, post-local SGD) and with any ``hook(state, bucket) -> Future``.
"""

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_teach.buckets import Bucket


class GradBucket:
    """What a hook is given; the methods of ``torch.distributed.GradBucket``, which cannot be made
    in Python."""

    def __init__(self, bucket: Bucket, place: int, is_last: bool):
        self._bucket, self._place, self._is_last = bucket, place, is_last

    def index(self) -> int:
        """The bucket's place in launch order, from 0."""
        return self._place

    def is_last(self) -> bool:
        """Whether this is the last bucket of this backward pass."""
        return self._is_last

    def buffer(self) -> Tensor:
        """The flat tensor with the gradients of this rank, not yet divided."""
        return self._bucket.flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the contents of the flat tensor."""
        self._bucket.flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """Views into the flat tensor, one per parameter, each in its parameter's shape."""
        return list(self._bucket.views)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order in which they lie in the flat tensor."""
        return list(self._bucket.params)


class HookResult:
    """What a hook has started for ``bucket``; the counterpart of an all-reduce's ``Work``."""

    def __init__(self, future: torch.futures.Future, bucket: Bucket):
        self.future, self.bucket = future, bucket

    def wait(self) -> None:
        """Wait for the hook, and put its result into the bucket if it is not there already."""
        result, bucket = self.future.wait(), self.bucket
        result = result[0] if isinstance(result, list | tuple) else result
        if result is bucket.flat:
            return
        if result.is_sparse:
            bucket.flat = result
        elif result.data_ptr() != bucket.flat.data_ptr() or result.dtype != bucket.flat.dtype:
            bucket.flat.copy_(result.view(bucket.flat.shape))


def run_hook(
    state: object, hook: Callable, bucket: Bucket, place: int, is_last: bool
) -> HookResult:
    """Give a full bucket, the one at ``place`` in launch order, to the user's hook."""
    return HookResult(hook(state, GradBucket(bucket, place, is_last)), bucket)


def check_hook(hook: Callable) -> None:
    """Raise ``TypeError`` or ``ValueError``, as torch does, if ``hook`` cannot be a hook."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {hook!r}.")
    signature, empty = inspect.signature(hook), inspect.Signature.empty
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (empty, dist.GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in (empty, torch.futures.Future[torch.Tensor]):
        future = "torch.futures.Future[torch.Tensor]"
        raise ValueError(f"Communication hook: return annotation should be {future}.")
