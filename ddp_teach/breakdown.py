"""Where the time of a training step goes, for every wrapper from the bare model to ours.

python -m ddp_teach.breakdown

While a step runs, a clock is told whenever one part of it ends and another begins: a gradient's
hook, a copy into or out of a bucket, the start of an all-reduce, a wait. What is left of the
backward pass is computing. Torch's reducer is C++ and calls nothing that could be timed from
Python, so its backward pass stays whole. Asking the clock costs about a microsecond each time: for
the length of a step, and nothing else, see ``bench``.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.buckets import Bucket
from ddp_teach.launch import launch
from ddp_teach.reducer import Reducer
from ddp_teach.steps import AverageAfterBackward, Buckets, OverlappedHooks
from ddp_teach.stopwatch import WRAPPERS
from ddp_teach.workloads import WORKLOADS

UNSPLIT = "backward in C++"
PARTS = ("forward", "computing", "hooks", "copies", "starting", "waiting", UNSPLIT)
WARM_UP_STEPS = 3  # in the first, the order of the gradients is learned

# Functions of the package, and to which part of a step the time belongs that is spent in them and
# in nothing below them that has a part of its own.
TIMED = (
    (AverageAfterBackward, "sync_gradients", "hooks"),
    (AverageAfterBackward, "_all_reduce_mean", "copies"),  # it divides by the number of ranks
    (OverlappedHooks, "_on_gradient", "hooks"),
    (OverlappedHooks, "_launch", "copies"),
    (OverlappedHooks, "_end_of_backward", "copies"),
    (Buckets, "_launch", "hooks"),
    (Bucket, "pack", "copies"),
    (Bucket, "unpack", "copies"),
    (Reducer, "complete", "hooks"),
)


class PartClock:
    """Adds up the seconds of each part. Parts may lie inside each other: time in the inner one does
    not count for the outer one. ``seconds`` holds the sums by part."""

    def __init__(self) -> None:
        self.open = ["outside"]
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(["outside", *PARTS], 0.0)
        self.since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs in the ``with`` block is part ``name``."""
        self._charge()
        self.open.append(name)
        try:
            yield
        finally:
            self._charge()
            self.open.pop()

    def timed(self, name: str, function: Callable) -> Callable:
        """``function``, whose time counts as part ``name``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call


class TimedWork:
    """What an asynchronous all-reduce returned, with waits that are timed."""

    def __init__(self, work: dist.Work, clock: PartClock):
        self.wait = clock.timed("waiting", work.wait)


@contextmanager
def watched(clock: PartClock) -> Iterator[None]:
    """Tell ``clock`` about the parts of every step in the ``with`` block; wrap models in it, too,
    because hooks are put on then."""
    all_reduce, gradient_hook = dist.all_reduce, Reducer._gradient_hook

    def timed_all_reduce(*args: Any, async_op: bool = False, **kwargs: Any) -> TimedWork | None:
        with clock.part("starting" if async_op else "waiting"):
            work = all_reduce(*args, async_op=async_op, **kwargs)
        return TimedWork(work, clock) if async_op else None

    def timed_hook(reducer: Reducer, i: int) -> Callable:
        return clock.timed("hooks", gradient_hook(reducer, i))

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "all_reduce", timed_all_reduce))
        stack.enter_context(patch.object(Reducer, "_gradient_hook", timed_hook))
        for owner, name, part in TIMED:
            timed = clock.timed(part, vars(owner)[name])
            stack.enter_context(patch.object(owner, name, timed))
        yield


def run_step(model: nn.Module, x: Tensor, clock: PartClock) -> list[float]:
    """Seconds of each of ``PARTS`` in one forward and backward pass."""
    model.zero_grad()
    dist.barrier()
    clock.restart()
    in_cpp = isinstance(model, nn.parallel.DistributedDataParallel)
    with clock.part("forward"):
        output = model(x).sum()
    with clock.part(UNSPLIT if in_cpp else "computing"):
        output.backward()
    if type(model) is AverageAfterBackward:  # later steps have inherited it, and don't need it
        model.sync_gradients()
    return [clock.seconds[part] for part in PARTS]


def measure(workload: str, steps: int) -> dict[str, list[float]]:
    """For every wrapper the parts of this rank's middle one of so many steps, by length."""
    model, x = WORKLOADS[workload]()
    clock = PartClock()
    with watched(clock):
        models = {name: wrap(copy.deepcopy(model)) for name, wrap in WRAPPERS.items()}
        taken: dict[str, list[list[float]]] = {name: [] for name in models}
        for _ in range(WARM_UP_STEPS + steps):
            for name, wrapper in models.items():
                taken[name].append(run_step(wrapper, x, clock))
    middle = (steps - 1) // 2
    return {name: sorted(rows[WARM_UP_STEPS:], key=sum)[middle] for name, rows in taken.items()}


def breakdown(workload: str = "narrow", steps: int = 9, nprocs: int = 2) -> dict[str, list[float]]:
    """For the bare model, every step of the ladder, torch's class and ours: the seconds that rank 0
    spends in each of ``PARTS``, in the middle one of ``steps`` steps, by length."""
    return launch(measure, workload, steps, nprocs=nprocs, timeout=300.0)[0]


def table(bars: Mapping[str, list[float]]) -> str:
    """What ``breakdown`` returned, as text to print: milliseconds."""
    heads = [*PARTS[:-1], "C++", "total"]
    lines = [f"{'':20}" + "".join(f"{head:>11}" for head in heads)]
    for name, seconds in bars.items():
        columns = "".join(f"{1e3 * s:11.2f}" for s in [*seconds, sum(seconds)])
        lines.append(f"{name:20}{columns}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(breakdown()))
