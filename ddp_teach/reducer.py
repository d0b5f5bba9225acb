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

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ddp_teach import complaints, unused
from ddp_teach.buckets import Bucket, GradientBucket, SparseBucket, assign_buckets
from ddp_teach.comm_hook import GradBucket, copy_result

UNKNOWN = 1 << 30  # static graph, first backward: nobody knows yet how often a hook will fire


class Reducer:
    """Averages the gradients of ``params`` over the ranks of ``group`` during backward.

    ``names`` and ``sparse`` (does this parameter get sparse gradients?) belong to ``params``;
    ``caps`` are bucket sizes in bytes, in force from the start if ``caps_at_once``. ``check_model``
    is called while the network works and may return an error message. The other arguments are those
    of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        caps: Sequence[int],
        *,
        caps_at_once: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        skip_all_reduce_unused_params: bool = False,
        batched_grad_copy: bool = False,
        check_model: Callable[[], str | None] = lambda: None,
    ):
        self.params, self.names, self.sparse = list(params), list(names), list(sparse)
        self.group, self.caps, self.check_model = group, caps, check_model
        self.rank, self.divisor = dist.get_rank(group), dist.get_world_size(group)
        self.static_graph = static_graph
        self.detect_unused = find_unused_parameters and not static_graph
        self.skip_unused, self.reciprocal = skip_all_reduce_unused_params, not batched_grad_copy
        self.bucket_type = GradientBucket if gradient_as_bucket_view else Bucket
        self.comm_hook: tuple[object, Callable] | None = None
        self.complaint = complaints.Complaint(self.params)
        self.iterations, self.first_time = 0, True

        n = len(self.params)
        self.fires = [UNKNOWN if static_graph else 1] * n  # hook calls that one backward will bring
        self.kept = [False] * n  # gradients left by no_sync, not averaged yet
        self.expecting = False  # a synchronising forward has run, its backward has not ended
        self.task: int | None = None  # id of the synchronising backward now running
        self.local = False  # the backward now running belongs to a forward in no_sync
        self.usage = unused.UsageCount(n, self.params[0].device, group)
        self.nodes = unused.accumulation_nodes(self.params) if self.detect_unused else []

        self.order: list[int] | None = None if self.detect_unused else []  # as gradients got ready
        first_caps = caps if self.detect_unused or caps_at_once else None
        self._build(sorted(assign_buckets(self.params, first_caps, self.sparse), key=min)[::-1])
        self._reset()
        self.handles = [
            p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self.params)
        ]

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters; the reducer does nothing any more."""
        for handle in self.handles:
            handle.remove()
        self.complaint.withdraw()

    def _build(self, assignment: Sequence[Sequence[int]]) -> None:
        self.buckets: list[Bucket] = []  # in launch order
        self.bucket_of: dict[int, Bucket] = {}
        for indices in assignment:
            kind = SparseBucket if self.sparse[indices[0]] else self.bucket_type
            params, names = [self.params[i] for i in indices], [self.names[i] for i in indices]
            bucket = kind(indices, params, names)
            self.buckets.append(bucket)
            self.bucket_of.update(dict.fromkeys(indices, bucket))

    # Forward: remember which kind of forward pass a later backward pass belongs to.

    def before_forward(self) -> None:
        """Raise what the last backward left to say; finish for the others one that was broken
        off."""
        self.complaint.raise_if_any()
        if (self.task is not None or self.local) and torch._C._current_graph_task_id() == -1:
            self.local = False
            self._complete(taking_part=False)

    def after_forward(self, outputs: Iterable[torch.Tensor], synchronise: bool) -> None:
        """Recognise a backward pass that comes through ``outputs``, by hooks on them."""
        self.expecting = self.expecting or synchronise
        on_gradient = self._enter_synchronising if synchronise else self._enter_local
        for tensor in outputs:
            if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
                tensor.register_hook(on_gradient)

    # Backward: from the first gradient to the last.

    def _enter_synchronising(self, _grad: torch.Tensor | None) -> None:
        if self.task is None or self.task != torch._C._current_graph_task_id():
            self._begin()

    def _enter_local(self, _grad: torch.Tensor | None) -> None:
        if not self.local and self.task is None:
            self.local = True
            Variable._execution_engine.queue_callback(self._leave_local)

    def _leave_local(self) -> None:
        self.local = False

    def _begin(self) -> None:
        if self.task is not None:
            self._complete(taking_part=False)
        self.task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(partial(self._end, self.task))
        self._reset()
        self._skip(unused.not_reached(self.nodes))
        self._skip([i for i, n in enumerate(self.fires) if n == 0] if self.static_graph else [])
        self._launch_full_buckets()

    def _reset(self) -> None:
        self.remaining = self.fires.copy()
        self.skipped: set[int] = set()
        self.late: list[int] = []
        self.in_flight: list[Bucket] = []
        for bucket in self.buckets:
            bucket.pending = len(bucket.params)

    def _skip(self, indices: Iterable[int]) -> None:
        for i in indices:
            self.skipped.add(i)
            self.remaining[i] = 0
            self.bucket_of[i].pending -= 1

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        def gradient_ready(_param: torch.Tensor) -> None:
            if self.task is None:
                if self.local or not self.expecting:
                    self.kept[i] = True
                    return
                self._begin()  # a backward that does not come through an output of forward
            self.remaining[i] = remaining = self.remaining[i] - 1
            if remaining == 0:
                if self.order is not None:
                    self.order.append(i)
                bucket = self.bucket_of[i]
                bucket.pending -= 1
                if bucket.pending == 0:
                    self._launch_full_buckets()
            elif remaining < 0:
                self._gradient_again(i)

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
        bucket.work = None
        if self.skip_unused and self.skipped.issuperset(bucket.indices):
            return
        if self.comm_hook is None:
            bucket.pack(self.divisor, self.reciprocal)
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        else:
            bucket.pack()
            state, hook = self.comm_hook
            bucket.work = hook(state, GradBucket(bucket, len(self.in_flight), len(self.buckets)))

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
        """Launch the buckets still missing, wait for all, and write the averages back.

        ``taking_part=False`` runs the same collectives with zeros and drops the result.
        """
        try:
            for bucket in self.buckets[len(self.in_flight) :]:
                self._launch(bucket if taking_part else bucket.without_gradients())
            idle = self._find_idle(taking_part)
            count = self.usage.share(idle) if self._counts_usage() else None
            problem = self.check_model() if taking_part else None
            if count is not None:
                count.wait()
            self._write_back(idle, taking_part)
        finally:
            self.task, self.expecting = None, False
        if taking_part:
            self.kept = [False] * len(self.params)
            self.iterations += 1
        self._learn(taking_part)
        if taking_part:
            self._complain(problem, idle)

    def _counts_usage(self) -> bool:
        return self.detect_unused or self.static_graph and self.first_time

    def _find_idle(self, taking_part: bool) -> list[int]:
        """The parameters to which this rank gave nothing since they were last averaged."""
        if not taking_part:
            return list(range(len(self.params)))
        lacking = any(bucket.lacks_gradient for bucket in self.in_flight)
        if not (lacking or self.skipped or any(self.remaining)):
            return []
        return [
            i
            for i, p in enumerate(self.params)
            if p.grad is None
            or (self.remaining[i] == self.fires[i] or i in self.skipped)
            and not self.kept[i]
        ]

    def _write_back(self, idle: list[int], taking_part: bool) -> None:
        leave = self.usage.used_nowhere() if idle and self._may_be_unused() else set()
        for bucket in self.in_flight:
            self._wait(bucket)
            if taking_part:
                if idle and not self._may_be_unused():
                    leave = bucket.empty_among(idle)
                bucket.unpack(leave)

    def _get_local_used_map(self) -> torch.Tensor:
        return self.usage.counts  # torch's name, and by now the count over all ranks

    def _may_be_unused(self) -> bool:
        return self.detect_unused or self.static_graph

    def _learn(self, taking_part: bool) -> None:
        """After the first backward: how often each hook fires, and in which order."""
        if self.static_graph and self.first_time:
            if taking_part:
                self.fires = [UNKNOWN - n for n in self.remaining]
        elif self.order is not None:
            self._rebuild_buckets()
        self.first_time = False

    def _rebuild_buckets(self) -> None:
        """Cut new buckets in the order in which rank 0's gradients became ready."""
        order = list(dict.fromkeys([*self.order, *range(len(self.params))]))
        agreed = torch.tensor(order, device=self.params[0].device)
        dist.broadcast(agreed, group=self.group, group_src=0)
        self.order, self.in_flight, order = None, [], agreed.tolist()
        params, sparse = [self.params[i] for i in order], [self.sparse[i] for i in order]
        self._build([[order[k] for k in b] for b in assign_buckets(params, self.caps, sparse)])

    def _complain(self, problem: str | None, idle: list[int]) -> None:
        if problem is not None:
            self.complaint.raise_now(problem)
        if self.late and self.static_graph:
            self.complaint.file(complaints.graph_shrank(self.rank, self.late, self.names))
            self.complaint.raise_now(complaints.graph_changed(self.rank, self.late, self.names))
        if self.late:
            self.complaint.raise_now(complaints.late_gradient(self.rank, self.late, self.names))
        if not idle or self.detect_unused:
            return
        if self.static_graph:
            missing = [i for i in idle if self.fires[i] > 0]
        else:
            nodes = unused.accumulation_nodes(self.params[i] for i in idle)
            missing = [idle[k] for k in unused.not_reached(nodes)]
        if missing:
            say = complaints.graph_shrank if self.static_graph else complaints.unused_parameters
            self.complaint.file(say(self.rank, missing, self.names))
