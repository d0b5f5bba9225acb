"""What a rank measures: seconds per step and per forward call of each variant, turn by turn.

What the figures mean, and why they are taken in this way, is told in ``bench``.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.ddp import DistributedDataParallel
from ddp_teach.steps import LADDER, AverageAfterBackward
from ddp_teach.workloads import WORKLOADS

TURN_SECONDS = 0.1  # about what torch's class takes for its turn
STEPS = range(3, 200)  # how many steps a turn may have
FORWARDS_PER_STEP = 3  # forward calls measured for every step; one takes about a third of it
WARM_UP_STEPS = 3  # in the first, the order of the gradients is learned

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    **{step.__name__: step for step in LADDER},
    "torch": nn.parallel.DistributedDataParallel,
    "ours": DistributedDataParallel,
}
VARIANTS = {name: WRAPPERS[name] for name in ("bare", "torch", "ours")}


def measure(names: list[str], rounds: int, ladder: bool = False) -> dict[str, dict[str, Any]]:
    """What this rank measures of each workload; all ranks call it. With ``ladder`` every step of
    the ladder is a variant, too."""
    variants = WRAPPERS if ladder else VARIANTS
    return {name: measure_workload(name, rounds, variants) for name in names}


def measure_workload(
    name: str, rounds: int, variants: Mapping[str, Callable[[nn.Module], nn.Module]]
) -> dict[str, Any]:
    """Seconds per step and per forward overhead, by variant, one number a round; and the sizes."""
    model, x = WORKLOADS[name]()
    models = {variant: wrap(copy.deepcopy(model)) for variant, wrap in variants.items()}
    steps = {variant: step_of(m, x) for variant, m in models.items()}
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    steps["all_reduce"] = lambda: dist.all_reduce(flat)
    for step in steps.values():
        seconds_of(step, WARM_UP_STEPS)
    per_turn = steps_per_turn(steps["torch"])
    calls = FORWARDS_PER_STEP * per_turn
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    overhead: dict[str, list[float]] = {variant: [] for variant in models}
    for variant in turns(list(steps), rounds):
        dist.barrier()
        seconds[variant].append(seconds_of(steps[variant], per_turn))
        if variant in models:
            overhead[variant].append(forward_overhead(models[variant], x, calls))
    return {
        "seconds": seconds,
        "forward_overhead": overhead,
        "steps_per_turn": per_turn,
        "parameters": flat.numel(),
        "gradient_bytes": sum(p.grad.nbytes for p in models["ours"].parameters()),
        "bucket_bytes": sum(b.flat.untyped_storage().nbytes() for b in models["ours"].buckets),
    }


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A training step of ``model`` on ``x``, as a function without arguments."""
    # The step does all its work, but each one finds the same weights as the one before.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        if type(model) is AverageAfterBackward:  # the later steps do it by themselves
            model.sync_gradients()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], Any], repeats: int) -> float:
    """Seconds that one of ``repeats`` calls in a row takes."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def steps_per_turn(step: Callable[[], Any]) -> int:
    """How many steps fill a turn, the same number on every rank."""
    seconds = torch.tensor(seconds_of(step, STEPS.start))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return min(max(round(TURN_SECONDS / seconds.item()), STEPS.start), STEPS.stop)


def turns(variants: list[str], rounds: int) -> Iterator[str]:
    """Whose turn it is: every variant once in each round, each round starting with the next one."""
    for i in range(rounds):
        first = i % len(variants)
        yield from variants[first:] + variants[:first]


def forward_overhead(model: nn.Module, x: Tensor, calls: int) -> float:
    """Median seconds of a call of ``model`` that are not spent in its module's ``forward``."""
    module = getattr(model, "module", model)
    forward, inside, outside = module.forward, 0.0, []

    def timed(*inputs: Any) -> Any:
        nonlocal inside
        start = time.perf_counter()
        output = forward(*inputs)
        inside = time.perf_counter() - start
        return output

    module.forward = timed
    try:
        for _ in range(calls):
            start = time.perf_counter()
            output = model(x)
            outside.append(time.perf_counter() - start - inside)
            del output  # taking the graph apart is not part of the forward call
    finally:
        del module.forward
    return median(outside)
