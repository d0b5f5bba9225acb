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
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank

from ddp_teach import unused
from ddp_teach.bucket_order import BucketOrder
from ddp_teach.bucket_queue import BucketQueue
from ddp_teach.complaints import BROKEN_OFF, INCOMPLETE, Complaint
from ddp_teach.passes import BackwardPasses

UNKNOWN = 1 << 30  # static graph, first backward: nobody knows yet how often a hook will fire


class Reducer(BackwardPasses):
    """Averages the gradients of some parameters over the ranks of ``group`` during backward.

    ``managed`` holds name, parameter, and whether its gradient is sparse; ``caps`` are bucket sizes
    in bytes; ``options`` is the wrapper, whose arguments of torch's names are read here.
    ``watch``, a weak reference, leads to what is called while the network works, and may return an
    error message.
    """

    def __init__(
        self, managed: Sequence, group: ProcessGroup, caps: list[int], options: Any, watch: ref
    ):
        super().__init__()
        names, self.params, _ = zip(*managed, strict=True)
        self.static, self.watch = options.static_graph, watch
        self.detect_unused = options.find_unused_parameters and not self.static
        self.skip_unused = options.skip_all_reduce_unused_params
        self.complaint = Complaint(get_rank(group), names, self.params, self.is_running)

        n = len(managed)
        self.iterations = 0
        # torch starts with one bucket, and cuts it up once it has seen the order of gradients
        self.lessons = [] if self.detect_unused else ["fires", "order"][not self.static :]
        self.order: list[int] = []  # in which gradients became ready
        self.fires = [UNKNOWN if self.static else 1] * n  # hook calls that one backward brings
        self.unreached: list[int] = []  # parameters that a static graph does not use
        self.given = [False] * n  # whether it got a gradient since its last average
        self.usage = unused.UsageCount(n, self.params[0].device, group)
        self.nodes = []  # where autograd brings a gradient to its parameter, to detect unused ones
        self.memory: list[tuple] = []  # where parameters and their values lay when last looked at

        self.bucket_order = BucketOrder(managed, group, caps, options.gradient_as_bucket_view)
        self.queue = BucketQueue(group, reciprocal=not options.batched_grad_copy)
        cut = self.detect_unused or bool(options.bucket_bytes_cap_list)
        self.queue.use(self.bucket_order.first(cut))
        self.hooks, self.handles = [self._gradient_hook(i) for i in range(n)], []
        self.put_hooks_last()

    def put_hooks_last(self) -> None:
        """Have a hook on every parameter, behind those of the user, which may change gradients."""
        if self.handles and [*map(next, map(reversed, self.registries))] == self.last:
            return
        for handle in self.handles:
            handle.remove()
        pairs = zip(self.params, self.hooks, strict=True)
        self.handles = [p.register_post_accumulate_grad_hook(hook) for p, hook in pairs]
        self.registries = [handle.hooks_dict_ref() for handle in self.handles]
        self.last = [handle.id for handle in self.handles]  # each registry is in order

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters; the reducer does nothing any more."""
        for handle in self.handles:
            handle.remove()
        self.complaint.close()

    # A synchronising backward pass, from the first gradient to the last.

    def expect(self) -> None:
        """A synchronising backward pass begins: every gradient is still to come."""
        self.put_hooks_last()  # the user may have added some
        memory = [(p._cdata, p.data_ptr()) for p in self.params]
        if memory != self.memory or None in self.nodes:
            self.memory = memory
            self._renew()
        self.remaining = self.fires.copy()  # hook calls still to come, per parameter
        self.skipped: set[int] = set()  # parameters that this backward pass will not reach
        self.late: list[int] = []  # parameters whose gradient came after their bucket was sent
        self.queue.expect()

    def _renew(self) -> None:
        """Parameters may have been moved, converted, unfrozen or swapped for others in place."""
        for p in self.params:  # autograd forgets the hooks of what torch.utils.swap_tensors swaps
            p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks
        if any(bucket.is_outdated() for bucket in self.queue.buckets):
            self.queue.use(self.bucket_order.again(self.queue.buckets))
        if self.detect_unused:
            self.nodes = unused.accumulation_nodes(self.params)

    def begin(self) -> None:
        """The first gradient is there, or backward has ended without any: parameters that it will
        not reach are ready."""
        for i in unused.not_reached(self.nodes) if self.detect_unused else self.unreached:
            self.skipped.add(i)
            self.remaining[i] = 0
            self.queue.bucket_of[i].pending -= 1
        if self.skip_unused:
            self.queue.unsent = self.skipped
        self.queue.launch_full()

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
                bucket = self.queue.bucket_of[i]
                bucket.pending -= 1
                if bucket.pending == 0:
                    self.queue.launch_full()

        return gradient_ready

    def _gradient_again(self, i: int) -> None:
        if self.static or self.queue.bucket_of[i] in self.queue.in_flight:
            self.late.append(i)
        self.skipped.discard(i)

    # The end of a synchronising backward pass.

    def complete(self, taking_part: bool = True) -> None:
        """Launch the buckets still missing, wait for all, write the averages back, and complain.

        ``taking_part=False`` runs the same collectives without gradients and drops the result: so
        does a rank whose backward was broken off, or that has run out of inputs (see ``uneven``).
        """
        if self.entered is None:
            self.expect()
        broken_off = not taking_part and self.entered is not None
        undefined = not taking_part and any(b.holds_gradients() for b in self.queue.in_flight)
        try:
            self.queue.launch_rest(taking_part, broken_off)
            idle = self._find_idle() if taking_part else range(len(self.params))
            if self.detect_unused or self.lessons[:1] == ["fires"]:
                self.usage.share(idle)
            watch = self.watch()
            problem = watch() if taking_part and watch is not None else None
            with torch.no_grad():
                self._write_back(idle, taking_part)
            incomplete = self.queue.who_broke_off(broken_off)
        finally:
            self.task = self.entered = None
            self.served, self.expecting = True, self.expecting and not self.recognised
        if self.lessons:
            self._learn()
        if taking_part:
            self._learn_fires()
            self.given = [False] * len(self.params)
            self.iterations += 1
            if incomplete:
                self.complaint.raise_now(f"On rank {incomplete} {INCOMPLETE}")
            missing = [] if self.detect_unused else [i for i in idle if self.fires[i] > 0]
            self.complaint.speak(problem, self.late, missing, self.static)
        elif undefined:
            self.complaint.raise_now(BROKEN_OFF)

    def _find_idle(self) -> Sequence[int]:
        """The parameters to which this rank gave nothing since they were last averaged."""
        if all(self.given) and not any(bucket.has_gaps for bucket in self.queue.in_flight):
            return ()
        gave = zip(self.given, self.params, strict=True)
        return [i for i, (given, p) in enumerate(gave) if not given or p.grad is None]

    def _write_back(self, idle: Sequence[int], taking_part: bool) -> None:
        """Wait for every bucket and make its contents the gradients, except where no rank gave one:
        a zero would move a parameter that an optimizer leaves alone while its gradient is None."""
        counted = self.detect_unused or self.static
        leave = self.usage.used_nowhere() if idle and counted else set()
        for bucket in self.queue.in_flight:
            self.queue.wait(bucket)
            if taking_part:
                bucket.unpack(leave if counted or not idle else bucket.empty_among(idle))

    def _learn(self) -> None:
        """``fires``: which parameters a static graph uses, counted by now, unless all ranks broke
        off. ``order``: in which order gradients became ready; new buckets are cut in that order."""
        if self.lessons[0] == "order":
            self.queue.use(self.bucket_order.learned(self.order))
        elif not self.usage.counts.any():
            return
        del self.lessons[0]

    def _learn_fires(self) -> None:
        """A static graph shows in this rank's first backward pass how often each hook fires."""
        if self.fires[0] == UNKNOWN:
            self.fires = [UNKNOWN - n for n in self.remaining]
            self.unreached = [i for i, n in enumerate(self.fires) if n == 0]

    def _get_local_used_map(self) -> Tensor:
        return self.usage.counts  # torch's name; after backward, on how many ranks each was used
