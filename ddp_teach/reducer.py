"""The reducer: averages gradients over all ranks while the backward pass is still running.

One hook per parameter notes that its gradient is ready. When the last gradient of a bucket is
there, the bucket's all-reduce starts, and backward goes on meanwhile. A callback at the end of
backward waits for the all-reduces and writes the averages back.

The invariant that keeps ranks from waiting for each other for ever: every synchronising backward
pass launches every bucket exactly once, in the same order on every rank, whatever a rank used,
missed or raised. What is missing when backward ends is sent as zeros, and said afterwards.

After torch's ``csrc/distributed/c10d/reducer.cpp`` and "PyTorch Distributed", Li et al., VLDB 2020.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_teach import complaints, unused
from ddp_teach.buckets import Bucket, GradientBucket, SparseBucket, assign_buckets
from ddp_teach.comm_hook import GradBucket, copy_result

UNKNOWN = 1 << 30  # static graph, first backward: nobody knows yet how often a hook will fire


class Reducer:
    """Averages the gradients of some parameters over the ranks of ``group`` during backward.

    ``managed`` holds name, parameter, and whether its gradient is sparse; ``caps`` are bucket sizes
    in bytes; ``options`` is the wrapper, whose arguments of torch's names are read here.
    ``check_model`` is called while the network works and may return an error message.
    """

    def __init__(
        self,
        managed: Sequence[tuple[str, nn.Parameter, bool]],
        group: dist.ProcessGroup,
        caps: Sequence[int],
        options: Any,
        check_model: Callable[[], str | None],
    ):
        self.names, self.params, self.sparse = zip(*managed, strict=True)
        self.group, self.caps, self.check_model = group, caps, check_model
        self.divisor, self.reciprocal = dist.get_world_size(group), not options.batched_grad_copy
        self.static_graph = options.static_graph
        self.detect_unused = options.find_unused_parameters and not options.static_graph
        self.skip_unused = options.skip_all_reduce_unused_params
        self.bucket_type = GradientBucket if options.gradient_as_bucket_view else Bucket
        self.complaint = complaints.Complaint(dist.get_rank(group), self.names, self.params)
        self.comm_hook: tuple[object, Callable] | None = None

        n = len(self.params)
        self.iterations, self.first_time = 0, True
        self.fires = [UNKNOWN if self.static_graph else 1] * n  # hook calls in one backward pass
        self.kept = [False] * n  # gradients left by no_sync, which no all-reduce has averaged yet
        self.expecting = False  # a synchronising forward has run, its backward has not ended
        self.task: int | None = None  # id of the synchronising backward now running
        self.local = False  # the backward now running belongs to a forward in no_sync
        self.usage = unused.UsageCount(n, self.params[0].device, group)
        self.nodes = unused.accumulation_nodes(self.params) if self.detect_unused else []

        # torch starts with one bucket, and cuts it up once it has seen the order of gradients
        self.order: list[int] | None = None if self.detect_unused else []
        at_once = self.detect_unused or options.bucket_bytes_cap_list
        assigned = assign_buckets(self.params, caps if at_once else None, self.sparse)
        self._build(sorted(assigned, key=min, reverse=True))
        hooks = [p.register_post_accumulate_grad_hook for p in self.params]
        self.handles = [hook(self._gradient_hook(i)) for i, hook in enumerate(hooks)]

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters; the reducer does nothing any more."""
        for handle in self.handles:
            handle.remove()
        self.complaint.withdraw()

    def _build(self, assigned: Sequence[Sequence[int]]) -> None:
        self.buckets: list[Bucket] = []  # in launch order
        for indices in assigned:
            kind = SparseBucket if self.sparse[indices[0]] else self.bucket_type
            members = [(self.params[i], self.names[i]) for i in indices]
            self.buckets.append(kind(indices, *zip(*members, strict=True)))
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}
        self._reset()

    def _reset(self) -> None:
        self.remaining = self.fires.copy()  # hook calls still to come, per parameter
        self.skipped: set[int] = set()  # parameters that this backward pass will not reach
        self.late: list[int] = []  # parameters whose gradient came after their bucket was sent
        self.in_flight: list[Bucket] = []
        for bucket in self.buckets:
            bucket.expect()

    # Forward: remember which kind of forward pass a later backward pass belongs to.

    def before_forward(self) -> None:
        """Raise what is left to say; end, for the other ranks' sake, a backward broken off."""
        self.complaint.raise_if_filed()
        if (self.task is not None or self.local) and torch._C._current_graph_task_id() == -1:
            self.local = False
            self._complete(taking_part=False)

    def after_forward(self, outputs: Iterable[Tensor], synchronise: bool) -> None:
        """Recognise a backward pass that comes through ``outputs``, by hooks on them."""
        self.expecting = self.expecting or synchronise
        enter = self._enter_synchronising if synchronise else self._enter_local
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(enter)
            elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(enter)

    # Backward: from the first gradient to the last.

    def _enter_synchronising(self, _grad: object) -> None:
        if self.task is None or self.task != torch._C._current_graph_task_id():
            self._begin()

    def _enter_local(self, _grad: object) -> None:
        if not self.local and self.task is None:
            self.local = True
            Variable._execution_engine.queue_callback(partial(setattr, self, "local", False))

    def _begin(self) -> None:
        if self.task is not None:
            self._complete(taking_part=False)
        self.task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(partial(self._end, self.task))
        self._reset()
        if self.detect_unused:
            self._skip(unused.not_reached(self.nodes))
        elif self.static_graph:
            self._skip(i for i, n in enumerate(self.fires) if n == 0)

    def _skip(self, indices: Iterable[int]) -> None:
        for i in indices:
            self.skipped.add(i)
            self.remaining[i] = 0
            self.bucket_of[i].pending -= 1
        self._launch_full_buckets()

    def _gradient_hook(self, i: int) -> Callable[[Tensor], None]:
        def gradient_ready(_param: Tensor) -> None:
            if self.task is None:
                if self.local or not self.expecting:
                    self.kept[i] = True
                    return
                self._begin()  # a backward that does not come through an output of forward
            self.remaining[i] = remaining = self.remaining[i] - 1
            if remaining < 0:
                self._gradient_again(i)
            elif remaining == 0:
                if self.order is not None:
                    self.order.append(i)
                bucket = self.bucket_of[i]
                bucket.pending -= 1
                if bucket.pending == 0:
                    self._launch_full_buckets()

        return gradient_ready

    def _gradient_again(self, i: int) -> None:
        if self.static_graph or self.bucket_of[i] in self.in_flight:
            self.late.append(i)
        self.skipped.discard(i)

    def _launch_full_buckets(self) -> None:
        for bucket in self.buckets[len(self.in_flight) :]:
            if bucket.pending > 0:
                break
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Start the bucket's all-reduce: the one place from which gradients are sent."""
        self.in_flight.append(bucket)
        if self.skip_unused and self.skipped.issuperset(bucket.indices):
            bucket.work = None
            return
        with torch.no_grad():  # backward(create_graph=True) comes here with gradients switched on
            if self.comm_hook is None:
                bucket.pack(self.divisor, self.reciprocal)
                bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            else:
                bucket.pack()
                state, hook = self.comm_hook
                position = len(self.in_flight), len(self.buckets)
                bucket.work = hook(state, GradBucket(bucket, *position))

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            result = bucket.work.wait()
            if self.comm_hook is not None:
                copy_result(result, bucket)
            bucket.work = None

    # The end of backward.

    def _end(self, task: int) -> None:
        if task == self.task:
            self._complete()

    def shadow(self) -> None:
        """Launch what a synchronising backward launches, with nothing to give (see ``uneven``)."""
        self._reset()
        self._complete(taking_part=False)

    def _complete(self, taking_part: bool = True) -> None:
        """Launch the buckets still missing, wait for all, write the averages back, and complain.

        ``taking_part=False`` runs the same collectives with zeros and drops the result.
        """
        try:
            for bucket in self.buckets[len(self.in_flight) :]:
                self._launch(bucket if taking_part else bucket.without_gradients())
            idle = self._find_idle() if taking_part else range(len(self.params))
            counted = self.detect_unused or (self.static_graph and self.first_time)
            count = self.usage.share(idle) if counted else None
            problem = self.check_model() if taking_part else None
            if count is not None:
                count.wait()
            with torch.no_grad():
                self._write_back(idle, taking_part)
        finally:
            self.task, self.expecting = None, False
        self._learn(taking_part)
        if taking_part:
            self.kept = [False] * len(self.params)
            self.iterations += 1
            self._complain(problem, idle)

    def _find_idle(self) -> list[int]:
        """The parameters to which this rank gave nothing since they were last averaged."""
        if not (self.skipped or any(self.remaining) or any(b.has_gaps for b in self.in_flight)):
            return []
        reached = [
            self.kept[i] or (i not in self.skipped and self.remaining[i] < self.fires[i])
            for i in range(len(self.params))
        ]
        return [i for i, p in enumerate(self.params) if p.grad is None or not reached[i]]

    def _write_back(self, idle: Sequence[int], taking_part: bool) -> None:
        allowed = self.detect_unused or self.static_graph
        leave = self.usage.used_nowhere() if idle and allowed else set()
        for bucket in self.in_flight:
            self._wait(bucket)
            if taking_part:
                bucket.unpack(leave if allowed or not idle else bucket.empty_among(idle))

    def _learn(self, taking_part: bool) -> None:
        """Static graph: how often each hook fires. Then the order in which gradients get ready."""
        if self.static_graph and self.first_time:
            self.fires = [UNKNOWN - n for n in self.remaining] if taking_part else self.fires
        elif self.order is not None:
            self._rebuild_buckets()
        self.first_time = False

    def _rebuild_buckets(self) -> None:
        """Cut new buckets in the order in which rank 0's gradients became ready."""
        order = dict.fromkeys([*self.order, *range(len(self.params))])
        agreed = torch.tensor(list(order), device=self.params[0].device)
        dist.broadcast(agreed, group=self.group, group_src=0)
        order, self.order, self.in_flight = agreed.tolist(), None, []
        ordered = [(self.params[i], self.sparse[i]) for i in order]
        assigned = assign_buckets([p for p, _ in ordered], self.caps, [s for _, s in ordered])
        self._build([[order[k] for k in places] for places in assigned])

    def _complain(self, problem: str | None, idle: Sequence[int]) -> None:
        if problem is not None:
            self.complaint.raise_now(problem)
        if self.late and self.static_graph:
            self.complaint.file(complaints.GRAPH_SHRANK, self.late)
            self.complaint.raise_now(complaints.GRAPH_GREW, self.late)
        if self.late:
            self.complaint.raise_now(complaints.LATE, self.late)
        if not idle or self.detect_unused:
            return
        nodes = unused.accumulation_nodes(self.params[i] for i in idle)
        missing = {idle[k] for k in unused.not_reached(nodes)}
        missing -= {i for i in idle if self.static_graph and self.fires[i] == 0}
        if missing:
            what = complaints.GRAPH_SHRANK if self.static_graph else complaints.UNUSED
            self.complaint.file(what, sorted(missing))

    def _get_local_used_map(self) -> Tensor:
        return self.usage.counts  # torch's name; after backward, on how many ranks each was used
