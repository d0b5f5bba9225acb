"""What a wrapper costs its own processor at any world size, without a cluster.

python -m ddp_teach.host_cost

The network is replaced by a process group that claims to have 1,024 ranks and completes every
collective at once, with this rank's own numbers. What a step then takes longer than the bare
model's is the wrapper's own work: its hooks, its copies, its bookkeeping. On a real cluster the
network's time comes on top (see ``cost_model``), but the host's does not change: nothing that a
wrapper does in a step depends on the number of ranks.

Counted is the processor time of the thread that runs the step, so that it hardly matters what else
the machine does.
"""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.launch import launch
from ddp_teach.stopwatch import VARIANTS, turns

PARAMETERS = (10, 100, 1_000, 10_000)
PARAMETERS_A_TURN = 10_000  # so many gradients make a turn long enough for the clock
WARM_UP_STEPS = 3  # in the first, the order of the gradients is learned


class InstantGroup(dist.ProcessGroup):
    """A process group of one process that claims to have more ranks: each of its collectives is
    done when the call returns. Right for measuring time only: all other ranks are copies of this
    one, and the sum that an all-reduce leaves is what went in."""

    group_name = "instant"

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size)

    def allreduce(self, tensors: list[Tensor], _options: Any) -> dist.Work:
        return done(tensors)

    def broadcast(self, tensors: list[Tensor], _options: Any) -> dist.Work:
        return done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any) -> Any:
        for copies, tensor in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.copy_(tensor)
        return done(outputs)

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return "instant"


def done(result: Any) -> dist.Work:
    """A collective that has ended, with ``result``."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def use_instant_group(world_size: int) -> None:
    """Make an ``InstantGroup`` of ``world_size`` ranks this process's default group."""
    if "instant" not in dist.Backend.backend_list:
        make = lambda _store, rank, size, _timeout: InstantGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend("instant", make, devices=["cpu"])
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("instant", store=dist.HashStore(), rank=0, world_size=world_size)


class ManyParameters(nn.Module):
    """``n`` parameters of one number each; a forward pass adds them all to its input."""

    def __init__(self, n: int):
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, *self.numbers]).sum()


def step_of(model: nn.Module) -> Callable[[], None]:
    """Zeroing the gradients, forward and backward, as a function without arguments."""
    x = torch.zeros(1)

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def measure(parameters: Sequence[int], world_size: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds per step by number of parameters: of the bare model, and what each class adds."""
    use_instant_group(world_size)
    rows = []
    for n in parameters:
        steps = {variant: step_of(wrap(ManyParameters(n))) for variant, wrap in VARIANTS.items()}
        repeats = max(PARAMETERS_A_TURN // n, 1)
        for step in steps.values():
            seconds_of(step, WARM_UP_STEPS)
        seconds: dict[str, list[float]] = {variant: [] for variant in steps}
        for variant in turns(list(steps), rounds):
            seconds[variant].append(seconds_of(steps[variant], repeats))
        added = {
            variant: median(a - b for a, b in zip(seconds[variant], seconds["bare"], strict=True))
            for variant in ("torch", "ours")
        }
        rows.append({"parameters": n, "bare": median(seconds["bare"]), **added})
    return rows


def seconds_of(step: Callable[[], None], repeats: int) -> float:
    """The median processor seconds of ``repeats`` calls, without garbage collections."""
    times = []
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    gc.enable()
    return median(times)


def host_cost(
    parameters: Sequence[int] = PARAMETERS, world_size: int = 1024, rounds: int = 7
) -> list[dict[str, Any]]:
    """For each number of parameters a dict: ``parameters``, the seconds of a ``bare`` step, and
    those that ``torch``'s class and ``ours`` add to it. Runs in a process of its own."""
    return launch(measure, list(parameters), world_size, rounds, nprocs=1, timeout=600.0)[0]


def table(rows: list[dict[str, Any]]) -> str:
    """What ``host_cost`` returned, as text to print: microseconds."""
    lines = [f"{'parameters':>10} {'bare':>10} {'torch':>10} {'ours':>10} {'ours/torch':>11}"]
    lines[0] += "  of ours, per parameter"
    for row in rows:
        times = " ".join(f"{1e6 * row[name]:10,.0f}" for name in ("bare", "torch", "ours"))
        each = 1e6 * row["ours"] / row["parameters"]
        ratio = row["ours"] / row["torch"]
        lines.append(f"{row['parameters']:10,} {times} {ratio:11.2f} {each:15.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(host_cost()))
