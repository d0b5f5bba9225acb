"""The reducer: averages gradients over all ranks while the backward pass is still running.

One hook per parameter notes that its gradient is ready. When the last gradient of a bucket is
there, the bucket's all-reduce starts, and backward goes on meanwhile. A callback at the end of
backward waits for the all-reduces and writes the averages back.

The invariant that keeps ranks from waiting for each other for ever: every synchronising backward
pass launches every bucket exactly once, in the same order on every rank, whatever a rank used,
missed or raised. What is missing when backward ends is sent as zeros, and said afterwards.

After torch's ``csrc/distributed/c10d/reducer.cpp`` and "PyTorch Distributed", Li et al., VLDB 2020.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_teach import unused
from ddp_teach.buckets import Bucket, assign_buckets
from ddp_teach.complaints import BROKEN_OFF, Complaint
from ddp_teach.passes import BackwardPasses
from ddp_teach.special_buckets import make_bucket

UNKNOWN = 1 << 30  # static graph, first backward: nobody knows yet how often a hook will fire


class Reducer(BackwardPasses):
    """Averages the gradients of some parameters over the ranks of ``group`` during backward.

    ``managed`` holds name, parameter, and whether its gradient is sparse; ``caps`` are bucket sizes
    in bytes; ``options`` is the wrapper, whose arguments of torch's names are read here.
    ``watch`` is called while the network works, and may return an error message.
    """

    def __init__(
        self, managed: Sequence, group: ProcessGroup, caps: list[int], options: Any, watch: Callable
    ):
        super().__init__()
        names, self.params, self.sparse = zip(*managed, strict=True)
        self.group, self.caps, self.check_model = group, caps, watch
        self.divisor, self.reciprocal = dist.get_world_size(group), not options.batched_grad_copy
        self.static = options.static_graph
        self.detect_unused = options.find_unused_parameters and not self.static
        self.skip_unused = options.skip_all_reduce_unused_params
        self.make_bucket = partial(make_bucket, managed, options.gradient_as_bucket_view)
        self.complaint = Complaint(dist.get_rank(group), names, self.params, self.is_running)
        self.comm_hook: Callable[[Bucket, int, bool], Any] | None = None  # see comm_hook.py

        n = len(managed)
        self.iterations = 0
        # torch starts with one bucket, and cuts it up once it has seen the order of gradients
        self.lessons = [] if self.detect_unused else ["fires", "order"][not self.static :]
        self.order: list[int] = []  # in which gradients became ready
        self.fires = [UNKNOWN if self.static else 1] * n  # hook calls that one backward brings
        self.unreached: list[int] = []  # parameters that a static graph does not use
        self.given = [False] * n  # whether it got a gradient since its last average
        self.usage = unused.UsageCount(n, self.params[0].device, group)
        self.nodes = unused.accumulation_nodes(self.params) if self.detect_unused else []

        at_once = self.detect_unused or options.bucket_bytes_cap_list
        assigned = assign_buckets(self.params, caps if at_once else None, self.sparse)
        self._use_buckets(sorted(assigned, key=min, reverse=True))
        hooks = [self._gradient_hook(i) for i in range(n)]
        pairs = zip(self.params, hooks, strict=True)
        self.handles = [p.register_post_accumulate_grad_hook(hook) for p, hook in pairs]

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters; the reducer does nothing any more."""
        for handle in self.handles:
            handle.remove()
        self.complaint.close()

    def _use_buckets(self, assigned: Sequence[Sequence[int]]) -> None:
        self.buckets = [self.make_bucket(indices) for indices in assigned]  # in launch order
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}
        self.in_flight: list[Bucket] = []

    def _expect_gradients(self) -> None:
        self.remaining = self.fires.copy()  # hook calls still to come, per parameter
        self.skipped: set[int] = set()  # parameters that this backward pass will not reach
        self.late: list[int] = []  # parameters whose gradient came after their bucket was sent
        self.in_flight = []
        for bucket in self.buckets:
            bucket.expect()

    # A synchronising backward pass, from the first gradient to the last.

    def begin(self) -> None:
        """A synchronising backward pass begins: parameters that it will not reach are ready."""
        self._expect_gradients()
        for i in unused.not_reached(self.nodes) if self.detect_unused else self.unreached:
            self.skipped.add(i)
            self.remaining[i] = 0
            self.bucket_of[i].pending -= 1
        self._launch_full_buckets()

    def _gradient_hook(self, i: int) -> Callable[[Tensor], None]:
        def gradient_ready(_param: Tensor) -> None:
            self.given[i] = True
            if self.task is None and not self.first_gradient():
                return
            self.remaining[i] = remaining = self.remaining[i] - 1
            if remaining < 0:
                self._gradient_again(i)
            elif remaining == 0:
                if self.lessons:
                    self.order.append(i)
                bucket = self.bucket_of[i]
                bucket.pending -= 1
                if bucket.pending == 0:
                    self._launch_full_buckets()

        return gradient_ready

    def _gradient_again(self, i: int) -> None:
        if self.static or self.bucket_of[i] in self.in_flight:
            self.late.append(i)
        self.skipped.discard(i)

    def _launch_full_buckets(self) -> None:
        for bucket in self.buckets[len(self.in_flight) :]:
            if bucket.pending > 0:
                break
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Start the bucket's all-reduce: the one place from which gradients are sent."""
        if self.comm_hook is not None:
            self._wait_for_hooks()
        place = len(self.in_flight)
        self.in_flight.append(bucket)
        if self.skip_unused and self.skipped.issuperset(bucket.indices):
            return
        with torch.no_grad():  # backward(create_graph=True) comes here with gradients switched on
            if self.comm_hook is None:
                bucket.pack(self.divisor, self.reciprocal)
                bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            else:
                bucket.pack()
                bucket.work = self.comm_hook(bucket, place, place + 1 == len(self.buckets))

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            self.waiting = bucket
            bucket.work.wait()
            bucket.work = None

    def _wait_for_hooks(self) -> None:
        # A hook may start a second collective when its first is done, in a thread of its own:
        # before that, no other may start here, or it would come in another order on another rank.
        for bucket in self.in_flight:
            self._wait(bucket)

    def waits_for(self) -> str:
        """The bucket that this rank waits for; a launch past its timeout says so."""
        place = self.buckets.index(self.waiting) + 1 if self.waiting in self.buckets else "?"
        return f"bucket {place} of {len(self.buckets)} ({', '.join(self.waiting.names)})"

    # The end of a synchronising backward pass.

    def complete(self, taking_part: bool = True) -> None:
        """Launch the buckets still missing, wait for all, write the averages back, and complain.

        ``taking_part=False`` runs the same collectives with zeros and drops the result: so does a
        rank whose backward was broken off, and one that has run out of inputs (see ``uneven``).
        """
        if self.task is None:
            self._expect_gradients()
        undefined = not taking_part and any(b.holds_gradients() for b in self.in_flight)
        idle: Sequence[int] = range(len(self.params))
        try:
            for bucket in self.buckets[len(self.in_flight) :]:
                self._launch(bucket if taking_part else bucket.without_gradients())
            if taking_part:
                idle = self._find_idle()
            if self.comm_hook is not None:
                self._wait_for_hooks()
            if self.detect_unused or self.lessons[:1] == ["fires"]:
                self.usage.share(idle)
            problem = self.check_model() if taking_part else None
            with torch.no_grad():
                self._write_back(idle, taking_part)
        finally:
            self.task = self.entered = None
            self.expecting = self.expecting and not self.recognised
        if self.lessons:
            self._learn(self.lessons.pop(0), taking_part)
        if taking_part:
            self.given = [False] * len(self.params)
            self.iterations += 1
            missing = [] if self.detect_unused else [i for i in idle if self.fires[i] > 0]
            self.complaint.speak(problem, self.late, missing, self.static)
        elif undefined:
            self.complaint.raise_now(BROKEN_OFF)

    def _find_idle(self) -> list[int]:
        """The parameters to which this rank gave nothing since they were last averaged."""
        if all(self.given) and not any(bucket.has_gaps for bucket in self.in_flight):
            return []
        gave = zip(self.given, self.params, strict=True)
        return [i for i, (given, p) in enumerate(gave) if not given or p.grad is None]

    def _write_back(self, idle: Sequence[int], taking_part: bool) -> None:
        """Wait for every bucket and make its contents the gradients, except where no rank gave one:
        a zero would move a parameter that an optimizer leaves alone while its gradient is None."""
        counted = self.detect_unused or self.static
        leave = self.usage.used_nowhere() if idle and counted else set()
        for bucket in self.in_flight:
            self._wait(bucket)
            if taking_part:
                bucket.unpack(leave if counted or not idle else bucket.empty_among(idle))

    def _learn(self, lesson: str, taking_part: bool) -> None:
        """``fires``: how often each hook fires in a static graph. ``order``: in which order the
        gradients of rank 0 became ready; new buckets are cut in that order."""
        if lesson == "order":
            order = dict.fromkeys([*self.order, *range(len(self.params))])
            agreed = torch.tensor(list(order), device=self.params[0].device)
            dist.broadcast(agreed, group=self.group, group_src=0)
            order = agreed.tolist()
            params, sparse = [self.params[i] for i in order], [self.sparse[i] for i in order]
            assigned = assign_buckets(params, self.caps, sparse)
            self._use_buckets([[order[k] for k in places] for places in assigned])
        elif taking_part:
            self.fires = [UNKNOWN - n for n in self.remaining]
            self.unreached = [i for i, n in enumerate(self.fires) if n == 0]

    def _get_local_used_map(self) -> Tensor:
        return self.usage.counts  # torch's name; after backward, on how many ranks each was used
