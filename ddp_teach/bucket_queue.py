"""Sends buckets over the network: in one fixed order, each as soon as it is full.

The order must be the same on every rank, because a collective has no name: the third all-reduce of
one rank meets the third all-reduce of another, whatever is in it.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_teach.buckets import Bucket

sent: Counter[str] = Counter()  # how many buckets this process has sent, by their group's name


class BucketQueue:
    """The buckets in launch order, and which of them the current backward pass has launched.

    A bucket is divided by ``divisor`` before ranks add theirs up: by multiplying with the
    reciprocal or (``reciprocal=False``) by a division, which rounds in another way.
    """

    def __init__(self, group: dist.ProcessGroup, reciprocal: bool):
        self.group, self.reciprocal = group, reciprocal
        self.divisor = dist.get_world_size(group)
        self.comm_hook: Callable[[Bucket, int, bool], Any] | None = None  # see comm_hook.py
        self.use([])

    def use(self, buckets: list[Bucket]) -> None:
        """From now on send these buckets."""
        self.buckets, self.in_flight = buckets, []
        self.bucket_of = {i: bucket for bucket in buckets for i in bucket.indices}

    def expect(self) -> None:
        """A backward pass begins: no bucket is full, none has been launched."""
        self.in_flight: list[Bucket] = []
        self.last_sent: Bucket | None = None
        self.unsent: set[int] = set()  # parameters that need not travel in this pass
        for bucket in self.buckets:
            bucket.expect()

    def launch_full(self) -> None:
        """Launch the buckets whose turn it is, up to the first that is not full."""
        for bucket in self.buckets[len(self.in_flight) :]:
            if bucket.pending > 0:
                break
            self._launch(bucket)

    def launch_rest(self, taking_part: bool, broken_off: bool) -> None:
        """Launch all buckets that are left, full or not. If this rank is not ``taking_part`` they
        hold zeros, or NaN where its backward was ``broken_off``: see ``who_broke_off``."""
        # A hook gets zeros: it may keep what it was given (PowerSGD), and never be rid of a NaN.
        filler = math.nan if broken_off and self.comm_hook is None else 0.0
        for bucket in self.buckets[len(self.in_flight) :]:
            self._launch(bucket if taking_part else bucket.filled(filler))
        if self.comm_hook is not None:
            self._wait_for_all()

    def who_broke_off(self, broken_off: bool) -> str:
        """The ranks, "1, 3" say, whose backward was broken off before they had sent all gradients.

        Call it when all buckets are here. Asking costs a collective, so it is asked only if the
        last bucket that was sent has NaN in it, which all ranks see alike, unless a hook has made
        it. An accelerator would have to be waited for to look: there the NaN itself has to do.
        """
        last = self.last_sent
        if last is None or self.comm_hook is not None or not last.flat.is_cpu:
            return ""
        if not last.begins_with_nan():
            return ""
        flags = torch.zeros(dist.get_world_size(self.group))
        flags[dist.get_rank(self.group)] = broken_off
        dist.all_reduce(flags, group=self.group)
        return ", ".join(map(str, flags.nonzero().flatten().tolist()))

    def _launch(self, bucket: Bucket) -> None:
        if self.comm_hook is not None:
            # A hook may start a second collective when its first is done, in a thread of its own:
            # no other may start before that, or it would come in another order on another rank.
            self._wait_for_all()
        if not self.unsent.issuperset(bucket.indices):
            self._send(bucket, place=len(self.in_flight))
        self.in_flight.append(bucket)  # only now: if that fails, zeros are sent in its place

    def _send(self, bucket: Bucket, place: int) -> None:
        sent[self.group.group_name] += 1
        bucket.number = sent[self.group.group_name]
        self.last_sent = bucket if bucket.numel else self.last_sent
        with torch.no_grad():  # backward(create_graph=True) comes here with gradients switched on
            if self.comm_hook is None:
                pack(bucket, self.divisor, self.reciprocal)
                bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            else:
                pack(bucket)
                bucket.work = self.comm_hook(bucket, place, place + 1 == len(self.buckets))

    def wait(self, bucket: Bucket) -> None:
        """Wait until the bucket holds the averages."""
        if bucket.work is not None:
            self.waiting = bucket
            work, bucket.work = bucket.work, None  # if it fails, nobody waits for it a second time
            work.wait()

    def _wait_for_all(self) -> None:
        for bucket in self.in_flight:
            self.wait(bucket)

    def waits_for(self) -> str:
        """The bucket that this rank waits for; a launch past its timeout says so."""
        place = self.in_flight.index(self.waiting)
        return f"bucket {place} of {len(self.buckets)} ({', '.join(self.waiting.names)})"

    def comes_from(self) -> tuple[str, list[int], int]:
        """Its group, that group's ranks, and how many buckets each must have sent there by then."""
        ranks = dist.get_process_group_ranks(self.group)
        return self.group.group_name, ranks, self.waiting.number


def pack(bucket: Bucket, *how: Any) -> None:
    """``bucket.pack(*how)``; raises ``RuntimeError`` with the names of gradients that don't fit."""
    try:
        bucket.pack(*how)
    except RuntimeError as error:
        pairs = zip(bucket.names, bucket.params, strict=True)
        sparse = [name for name, p in pairs if p.grad is not None and p.grad.is_sparse]
        names = ", ".join(sparse or bucket.names)
        raise RuntimeError(f"The gradient of {names} can't be sent: {error}") from error
