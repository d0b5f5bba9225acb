"""Whole wrappers as learners might write them, each in a style of its own and right in all steps.

``GraphWalk``: hooks and flags; unused parameters are found by a walk through the autograd graph.
``OnTheLadder``: goes on from the course's ``Buckets``; unused parameters are those that sent no
gradient when backward ends; broadcasts buffers before every forward pass.
``MultiGradHooks``: torch's own parts: a hook for several gradients, futures, ``Join``.

Faults are planted in them by replacing one method.
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_leaves

from ddp_teach import DistributedDataParallel
from ddp_teach.steps import Buckets


def broadcast(tensors, src=0):
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, src)
        tensor.data.copy_(values)


def cut(params, cap):
    """Buckets of one dtype each, from the last parameter to the first."""
    buckets, open_buckets = [], {}
    for param in reversed(params):
        bucket = open_buckets.get(param.dtype)
        if bucket is None:
            bucket = open_buckets[param.dtype] = []
            buckets.append(bucket)
        bucket.append(param)
        if sum(p.numel() * p.element_size() for p in bucket) >= cap:
            del open_buckets[param.dtype]
    return buckets


class GraphWalk(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, find_unused_parameters=False):
        super().__init__()
        self.module = module
        self.find_unused = find_unused_parameters
        self.sync = True  # what no_sync switches
        self.sync_backward = False  # what the last forward pass saw
        self.joining = False
        broadcast([*module.parameters(), *module.buffers()])
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.buckets = cut(self.params, bucket_cap_mb * 2**20)
        self.used = set()  # parameters with a gradient since the last average
        self.works = []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.gradient_ready)

    # forward

    def forward(self, *inputs, **kwargs):
        if self.joining:
            self.steps += 1
            self.announce(1)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.sync_backward = self.sync
            if self.sync:
                self.prepare(output)
        return output

    def prepare(self, output):
        for work, _ in self.works:
            work.wait()
        unused = self.unused_in(output) if self.find_unused else set()
        self.missing = [set(bucket) - unused for bucket in self.buckets]
        self.works, self.begun = [], False

    def unused_in(self, output):
        todo = [t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        seen = set()
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [following for following, _ in node.next_functions]
        return set(self.params) - {getattr(node, "variable", None) for node in seen}

    # backward

    def gradient_ready(self, param):
        self.used.add(param)
        if not self.sync_backward:
            return
        if not self.begun:
            self.begun = True
            Variable._execution_engine.queue_callback(self.finish)
        for missing in self.missing:
            missing.discard(param)
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self.launch()

    @torch.no_grad()
    def launch(self, zeros=False):
        bucket = self.buckets[len(self.works)]
        parts = [self.part(param, zeros) for param in bucket]
        flat = torch.cat(parts) / dist.get_world_size()
        self.works.append((dist.all_reduce(flat, async_op=True), flat))

    def part(self, param, zeros):
        if zeros or param.grad is None:
            return torch.zeros_like(param).flatten()
        return param.grad.flatten()

    @torch.no_grad()
    def finish(self):
        if not self.find_unused and any(self.missing):
            raise RuntimeError("a parameter got no gradient; pass find_unused_parameters=True")
        while len(self.works) < len(self.buckets):
            self.launch()
        used = self.used_somewhere(self.used)
        for bucket, (work, flat) in zip(self.buckets, self.works, strict=True):
            work.wait()
            for param, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if param in used:
                    self.write_back(param, mean.view_as(param))
        self.works, self.used = [], set()
        self.missing, self.begun = [set(bucket) for bucket in self.buckets], False

    def write_back(self, param, mean):
        if param.grad is None:
            param.grad = mean.clone()
        else:
            param.grad.copy_(mean)

    def used_somewhere(self, used):
        if not self.find_unused:
            return set(self.params)
        counts = torch.tensor([int(p in used) for p in self.params])
        dist.all_reduce(counts)
        return {p for p, n in zip(self.params, counts.tolist(), strict=True) if n}

    # no_sync and join

    @contextmanager
    def no_sync(self):
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def announce(self, active):
        """How many ranks run a step now, and how many of these synchronise."""
        counts = torch.tensor([active, int(active and self.sync)])
        dist.all_reduce(counts)
        return counts.tolist()

    @contextmanager
    def join(self):
        self.joining, self.steps = True, 0
        try:
            yield
            self.answer_the_others()
        finally:
            self.joining = False
        broadcast([*self.module.parameters(), *self.module.buffers()], src=self.last_to_join())

    def answer_the_others(self):
        while True:
            active, synchronising = self.announce(0)
            if not active:
                return
            if synchronising:
                self.shadow()

    def shadow(self):
        self.works = []
        while len(self.works) < len(self.buckets):
            self.launch(zeros=True)
        self.used_somewhere(())
        for work, _ in self.works:
            work.wait()
        self.works = []

    def last_to_join(self):
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, torch.tensor([self.steps]))
        return max(range(len(steps)), key=lambda rank: steps[rank].item())


class OnTheLadder(Buckets):
    def __init__(self, module, bucket_cap_mb=None, find_unused_parameters=False):
        super().__init__(module, bucket_cap_mb=bucket_cap_mb)
        self.find_unused_parameters = find_unused_parameters
        self.require_sync = self.will_sync = True
        self.in_join = False
        self.touched = set()

    def forward(self, *inputs, **kwargs):
        source = 0
        if self.in_join:
            source = self.highest(dist.get_rank())
            self.highest(int(self.require_sync))
        if torch.is_grad_enabled():
            self.will_sync = self.require_sync
        if self.require_sync:
            broadcast(self.module.buffers(), source)
        return super().forward(*inputs, **kwargs)

    @torch.no_grad()
    def _on_gradient(self, param):
        self.touched.add(param)
        if self.will_sync:
            super()._on_gradient(param)

    @torch.no_grad()
    def _end_of_backward(self):
        silent = [p for p in self.names if p not in self.ready and self.find_unused_parameters]
        filled = {p for p in silent if p.grad is None}
        for param in filled:
            param.grad = torch.zeros_like(param)
        self.ready.update(silent)
        self._launch(None)
        super()._end_of_backward()
        if self.find_unused_parameters:
            for param, users in zip(self.names, self.count_users(self.touched), strict=True):
                if param in filled and users == 0:
                    param.grad = None
        self.touched = set()

    def count_users(self, touched):
        counts = torch.tensor([float(p in touched) for p in self.names])
        dist.all_reduce(counts)
        return counts.tolist()

    @contextmanager
    def no_sync(self):
        before = self.require_sync
        self.require_sync = False
        try:
            yield
        finally:
            self.require_sync = before

    def highest(self, number):
        number = torch.tensor(number)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number.item()

    @contextmanager
    def join(self):
        self.in_join = True
        try:
            yield
        except BaseException:
            self.in_join = False
            raise
        last = True
        while (source := self.highest(-1)) >= 0:
            last = False
            if self.highest(0):
                broadcast(self.module.buffers(), source)
                self.shadow()
        self.in_join = False
        source = self.highest(dist.get_rank() if last else -1)
        broadcast([*self.module.parameters(), *self.module.buffers()], source)

    def shadow(self):
        for bucket in self.buckets:
            dist.all_reduce(torch.zeros_like(bucket.flat))
        if self.find_unused_parameters:
            self.count_users(())


class MultiGradHooks(nn.Module, Joinable):
    def __init__(self, module, bucket_cap_mb=25, find_unused_parameters=False):
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.groups = cut(
            [p for p in module.parameters() if p.requires_grad], bucket_cap_mb * 2**20
        )
        for k, group in enumerate(self.groups):
            torch.autograd.graph.register_multi_grad_hook(group, partial(self.group_ready, k))
        self.futures = {}
        self.clear()
        broadcast([*module.parameters(), *module.buffers()])

    def forward(self, *args, **kwargs):
        if Join.notify_join_context(self) is not None:
            self.tell(int(self.require_backward_grad_sync))
        result = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.clear()
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.begin)
        return result

    def clear(self):
        for future in self.futures.values():  # left by a backward that an exception broke off
            future.wait()
        self.running, self.gradients, self.futures = False, {}, {}

    def begin(self, _grad):
        if not self.running:
            self.running = True
            # what no_sync left; a hook may come before or after its gradient is added to .grad
            self.before = {
                p: p.grad.clone() for p in self.module.parameters() if p.grad is not None
            }
            Variable._execution_engine.queue_callback(self.end)

    def group_ready(self, k, grads):
        if not self.running:
            return
        self.gradients[k] = grads
        while len(self.futures) in self.gradients:
            self.send(len(self.futures), self.gradients[len(self.futures)])

    @torch.no_grad()
    def send(self, k, grads):
        pieces = []
        for param, grad in zip(self.groups[k], grads, strict=True):
            parts = [part for part in (self.before.get(param), grad) if part is not None]
            pieces.append(sum(parts, torch.zeros_like(param)).reshape(-1))
        flat = torch.cat(pieces)
        world_size = dist.get_world_size()
        future = dist.all_reduce(flat, async_op=True).get_future()
        self.futures[k] = future.then(lambda done: done.value()[0] / world_size)

    @torch.no_grad()
    def end(self):
        for k in range(len(self.futures), len(self.groups)):
            self.send(k, self.gradients.get(k, [None] * len(self.groups[k])))
        params = [p for group in self.groups for p in group]
        used = self.anywhere([p.grad is not None for p in params])
        for k, group in enumerate(self.groups):
            means = self.futures.pop(k).wait().split([p.numel() for p in group])
            for param, mean in zip(group, means, strict=True):
                if used.pop(0):
                    param.grad = mean.view_as(param)
        self.clear()

    def anywhere(self, flags):
        flags = torch.tensor(flags, dtype=torch.uint8)
        if self.find_unused_parameters:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags.tolist()

    @contextmanager
    def no_sync(self):
        old, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = old

    def tell(self, number):
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def join(self):
        return Join([self])

    def join_hook(self, **kwargs):
        return Answers(self)

    join_device = torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


class Answers(JoinHook):
    def __init__(self, wrapper):
        self.wrapper = wrapper

    def main_hook(self):
        if self.wrapper.tell(0):
            for group in self.wrapper.groups:
                dist.all_reduce(torch.cat([torch.zeros_like(p).flatten() for p in group]))
            self.wrapper.anywhere([False] * sum(map(len, self.wrapper.groups)))

    def post_hook(self, is_last_joiner):
        wrapper = self.wrapper
        src = wrapper.tell(dist.get_rank() if is_last_joiner else -1)
        broadcast([*wrapper.module.parameters(), *wrapper.module.buffers()], src)
        Joinable.__init__(wrapper)


COMPLETE = [
    GraphWalk,
    OnTheLadder,
    MultiGradHooks,
    DistributedDataParallel,
    nn.parallel.DistributedDataParallel,
]
