"""All-reduces and training steps timed on 2, 3, ... of the ranks that this machine can run.

python -m ddp_teach.rank_sweep

The cost model is fitted to the all-reduces. The steps it has not seen: they show how well it
predicts.
"""

import copy
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_teach.buckets import FIRST_CAP_BYTES
from ddp_teach.cost_model import Network, Sample, all_reduce_seconds, fit, table
from ddp_teach.ddp import DistributedDataParallel
from ddp_teach.launch import launch
from ddp_teach.stopwatch import seconds_of, step_of
from ddp_teach.workloads import WORKLOADS

RANKS = range(2, 9)
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes of the all-reduces that are measured
BYTES_A_TURN = 1 << 22  # so many all-reduces in a row make a turn: small ones are many,
CALLS_A_TURN = range(1, 11)  # but not too many
STEPS_A_TURN, WARM_UP_STEPS = 2, 3

Seconds = dict[tuple[int, Any], list[float]]  # of a turn, by ranks and what was measured


class Step(NamedTuple):
    """A training step on so many ``ranks``: seconds of the ``bare`` model and of ``ours``, and the
    bytes of gradients that the latter sends, in one bucket."""

    ranks: int
    bare: float
    ours: float
    nbytes: int


def sweep(
    ranks: Sequence[int] = tuple(RANKS),
    sizes: Sequence[int] = SIZES,
    rounds: int = 9,
    workload: str = "narrow",
) -> tuple[list[Sample], list[Step]]:
    """Time all-reduces of ``sizes`` bytes and steps of ``workload`` on each number of ``ranks``. Of
    several rounds the median is told, and each takes as long as its slowest rank.

    Raises ``ValueError`` for a workload whose gradients do not fit into one bucket: what of several
    buckets hides behind the backward pass, ``predicted_seconds`` does not know.
    """
    nbytes = sum(p.nbytes for p in WORKLOADS[workload]()[0].parameters())
    if nbytes > FIRST_CAP_BYTES:
        raise ValueError(
            f"The gradients of {workload!r} fill more than one bucket: {nbytes} bytes."
        )
    call = (list(ranks), list(sizes), rounds, workload)
    found = launch(measure_on_rank, *call, nprocs=max(ranks), timeout=300.0)

    def seconds(n: int, what: Any) -> float:
        return median(map(max, zip(*(rank[n, what] for rank in found[:n]), strict=True)))

    samples = [Sample(n, size, seconds(n, size)) for n in ranks for size in sizes]
    return samples, [Step(n, seconds(n, "bare"), seconds(n, "ours"), nbytes) for n in ranks]


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_on_rank(ranks: list[int], sizes: list[int], rounds: int, workload: str) -> Seconds:
    """What this rank measures; all ranks call it."""
    seconds: Seconds = {}
    for n in ranks:
        group = dist.new_group(list(range(n)))
        if dist.get_rank() < n:
            for what, call, repeats in things_to_time(group, sizes, workload):
                seconds[n, what] = []
                for _ in range(rounds):
                    dist.barrier(group)  # all ranks begin at about the same time
                    seconds[n, what].append(seconds_of(call, repeats))
        dist.barrier()  # those who are not in the group wait without using the processor
    return seconds


def things_to_time(
    group: dist.ProcessGroup, sizes: list[int], workload: str
) -> list[tuple[Any, Callable[[], Any], int]]:
    """Triples: the size of an all-reduce or the name of a step, what to call, and how often in a
    turn. Everything has been called before."""
    found: list[tuple[Any, Callable[[], Any], int]] = []
    for size in sizes:
        flat = torch.zeros(size // 4)
        calls = min(max(BYTES_A_TURN // size, CALLS_A_TURN.start), CALLS_A_TURN.stop - 1)
        found.append((size, lambda flat=flat: dist.all_reduce(flat, group=group), calls))
    model, x = WORKLOADS[workload]()
    ours = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    found += [(name, step_of(m, x), STEPS_A_TURN) for name, m in (("bare", model), ("ours", ours))]
    for _, call, _ in found:
        for _ in range(WARM_UP_STEPS):
            call()
    return found


def predicted_seconds(step: Step, network: Network) -> float:
    """A step as the model sees it: computing as the bare model does, then one all-reduce of one
    bucket, which is full only when backward is over, so that nothing is hidden."""
    return step.bare + all_reduce_seconds(step.nbytes, step.ranks, network)


def step_table(steps: Sequence[Step], network: Network) -> str:
    """Predicted beside measured step time for each number of ranks: milliseconds, and the error as
    a share of what was measured."""
    head = ("bare, measured", "all-reduce, modelled", "predicted", "measured", "error")
    lines = ["ranks  " + "  ".join(head)]
    for step in steps:
        predicted = predicted_seconds(step, network)
        sent = all_reduce_seconds(step.nbytes, step.ranks, network)
        times = [f"{1e3 * s:.2f}" for s in (step.bare, sent, predicted, step.ours)]
        row = [*times, f"{100 * (predicted / step.ours - 1):+.0f} %"]
        lines.append(f"{step.ranks:5}  " + "  ".join(map(str.rjust, row, map(len, head))))
    return "\n".join(lines)


if __name__ == "__main__":
    samples, steps = sweep()
    network = fit(samples, cores())
    print(table(samples, network), "", step_table(steps, network), sep="\n")
