"""The ladder: five wrappers, each adding one idea of DistributedDataParallel to the one before.

All of them expect what every DDP program is built on: each rank (process) wraps the same model,
once, runs the same steps on data of its own, and uses every parameter that requires a gradient in
every step. The finished class, in ``ddp.py``, checks that, and lifts the last rule.

``process_group`` says which ranks train together; ``None`` means all. Where there is no process
group, torch raises ``ValueError`` at the first collective (``ForwardOnly`` has none).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_teach.buckets import Bucket, assign_buckets, bucket_caps


class ForwardOnly(nn.Module):
    """Step 1 passes every call on to ``module`` and returns what it returns. The ranks know nothing
    of each other: each trains a model of its own."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class SameStart(ForwardOnly):
    """Step 2 adds: every rank starts with rank 0's parameters and buffers. From the first optimizer
    step on the models drift apart, because each follows the gradients of its own rank's data."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor = tensor.detach()  # its values, without autograd
            values = tensor.contiguous()  # a collective sends memory as it lies, gaps and all
            dist.broadcast(values, group=process_group, group_src=0)
            tensor.copy_(values)


class AverageAfterBackward(SameStart):
    """Step 3 adds ``sync_gradients()``, to be called between ``backward()`` and the optimizer's
    step: equal models with equal gradients stay equal. But the network idles while backward
    computes, and the processor idles while gradients travel."""

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace every gradient by its mean over all ranks; one that is ``None`` stays so."""
        for param in self.module.parameters():
            if param.requires_grad and param.grad is not None:
                self._all_reduce_mean(param.grad)

    def _all_reduce_mean(self, tensor: Tensor, async_op: bool = False) -> dist.Work | None:
        # divided before the sum, which could overflow; by the reciprocal, to equal torch to the bit
        tensor.mul_(1 / dist.get_world_size(self.process_group))
        return dist.all_reduce(tensor, group=self.process_group, async_op=async_op)


class OverlappedHooks(AverageAfterBackward):
    """Step 4 adds a hook per parameter, which starts the all-reduce the moment that gradient is
    ready, while backward computes the next; when ``backward()`` returns, the means are there. But
    each parameter costs an all-reduce, each all-reduce a latency, however few its bytes, and ranks
    that get their gradients ready in different orders sum up unrelated ones."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.backward_id, self.ready, self.in_flight = None, set(), []
        for param in self.names:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @torch.no_grad()
    def _on_gradient(self, param: nn.Parameter) -> None:
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self.backward_id:  # the first gradient of a new backward pass
            for work, _ in self.in_flight:  # left by a pass that an exception broke off
                work.wait()
            self.backward_id, self.ready, self.in_flight = backward_id, set(), []
            Variable._execution_engine.queue_callback(self._end_of_backward)
        self.ready.add(param)
        self._launch(param.grad)

    def _launch(self, grad: Tensor) -> None:
        mean = grad.clone()  # a copy travels, so that nobody reads or writes half a result
        work = self._all_reduce_mean(mean, async_op=True)
        self.in_flight.append((work, partial(grad.copy_, mean)))

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        if unused := [name for param, name in self.names.items() if param not in self.ready]:
            what = f"Rank {dist.get_rank()} got no gradient for {', '.join(unused)}"
            raise RuntimeError(f"{what}. Use it in every step, or freeze it before wrapping.")
        for work, write_back in self.in_flight:
            work.wait()
            write_back()
        self.in_flight = []


class Buckets(OverlappedHooks):
    """Step 5 adds buckets: flat tensors that carry many gradients in one all-reduce. They are
    filled from the last parameter to the first, as backward goes, and launched in that order even
    if they fill in another, so that all ranks sum the same things. Still missing: ``no_sync``,
    unused parameters, buffers that change, ``join``."""

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,  # None: 1 MiB for the first bucket, then 25
    ):
        super().__init__(module, process_group)
        self.buckets, params = [], list(self.names)[::-1]
        for indices in assign_buckets(params, bucket_caps(bucket_cap_mb)):
            members = [params[i] for i in indices]
            places = [len(params) - 1 - i for i in indices]
            self.buckets.append(Bucket(places, members, [self.names[p] for p in members]))

    def _launch(self, grad: Tensor) -> None:
        for bucket in self.buckets[len(self.in_flight) :]:
            if not self.ready.issuperset(bucket.params):
                break
            bucket.pack()
            work = self._all_reduce_mean(bucket.flat, async_op=True)
            self.in_flight.append((work, bucket.unpack))

    def extra_repr(self) -> str:
        return "\n".join(map(repr, self.buckets))


LADDER = (ForwardOnly, SameStart, AverageAfterBackward, OverlappedHooks, Buckets)
