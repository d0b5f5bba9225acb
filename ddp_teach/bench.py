"""ddp_teach, torch's class and the bare model side by side: what a training step costs.

python -m ddp_teach.bench [--json] [--rounds 21] [--nprocs 2] [--workload mlp --workload conv]
                          [--ladder]

**Step.** A step is ``zero_grad``, forward, backward and an SGD step, on ranks of one thread each.
All variants live in the same processes and share one process group. In every round each variant has
one turn, some steps in a row after a barrier, and every round starts with another variant: what
else the machine does meets all of them alike. A turn takes as long as its slowest rank. Told are
the median seconds over the rounds and the median over the rounds of the ratio within a round, which
is steadier than the ratio of the medians.

**Bound.** ``all_reduce`` is one all-reduce of as many bytes as the gradients have, in one flat
tensor. A step has to do its computing (the bare step) and to move its gradients; overlapping can at
best hide the shorter behind the longer, so the larger of the two bounds every wrapper from below.
That is the argument for overlapping in "PyTorch Distributed", Li et al., VLDB 2020, section 3.2.3,
put as a roofline (Williams et al., CACM 2009). Ranks that share their cores with the all-reduce, as
here, can't reach it.

**Forward overhead.** What a wrapper adds to a forward call: the call's seconds less those spent in
the module's own ``forward`` within that same call, less what this comes to for the bare model.
Without backward; median of each turn's calls, then over the rounds. The same wrapper costs several
times more around a large model than around ``linear``, because the processor's caches have
forgotten it meanwhile. Where the model has buffers (``conv``), sending them is part of it.

**Memory.** Bytes of our buckets and of the gradients, after the last step.

**Ladder.** On request every step of the ladder takes its turns, too.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterable
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddp_teach.call import MOST_RANKS, short
from ddp_teach.launch import LaunchError, launch
from ddp_teach.stopwatch import WRAPPERS, measure
from ddp_teach.workloads import WORKLOADS

MOST_ROUNDS = 1000


def bench(
    workloads: Iterable[str] = tuple(WORKLOADS),
    rounds: int = 21,
    nprocs: int = 2,
    ladder: bool = False,
) -> dict[str, Any]:
    """Measure each of ``workloads`` on ``nprocs`` ranks; ``table`` makes the result readable.

    The result is made of dicts, str, int and float. ``["workloads"][name]`` has ``parameters`` (how
    many numbers), ``steps_per_turn``, ``seconds`` (per step: ``bare``, ``torch``, ``ours``,
    ``all_reduce``, and with ``ladder`` the class names of its steps), ``bound_seconds``,
    ``ours_over_torch``, ``forward_overhead_seconds`` (``torch`` and ``ours``),
    ``forward_overhead_ratio``, ``gradient_bytes`` and ``bucket_bytes``. Beside it:
    ``ours_over_torch`` (geometric mean), ``rounds``, ``nprocs``, ``torch_version``.

    Raises ``TypeError`` or ``ValueError`` for arguments that can't be used, ``LaunchError`` if a
    rank fails.
    """
    names = check(workloads, rounds, nprocs)
    patience = 120.0 + 20.0 * rounds * len(names)  # a turn that slow is no turn any more
    ranks = launch(measure, names, rounds, ladder, nprocs=nprocs, timeout=patience)
    results = {name: summarise([rank[name] for rank in ranks]) for name in names}
    return {
        "torch_version": torch.__version__,
        "nprocs": len(ranks),
        "rounds": rounds,
        "workloads": results,
        "ours_over_torch": geometric_mean([r["ours_over_torch"] for r in results.values()]),
    }


def check(workloads: Iterable[str], rounds: int, nprocs: int) -> list[str]:
    """The names of the workloads, each once; raise for what ``bench`` can't work with."""
    for name, value, most in ("rounds", rounds, MOST_ROUNDS), ("nprocs", nprocs, MOST_RANKS):
        accepted = f"bench: {name} must be a whole number from 1 to {most}, got {short(value)}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(accepted)
        if not 1 <= value <= most:
            raise ValueError(accepted)
    accepted = f"bench: workloads must be a list with some of {', '.join(WORKLOADS)}"
    if isinstance(workloads, str) or not isinstance(workloads, Iterable):
        raise TypeError(f"{accepted}, got {short(workloads)}")
    names = list(workloads)
    for name in names:
        if not isinstance(name, str) or name not in WORKLOADS:
            raise ValueError(f"{accepted}, got {short(name)} in it")
    if not names:
        raise ValueError(f"{accepted}, got an empty one")
    return list(dict.fromkeys(names))


def summarise(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One workload's figures from what its ranks measured (see ``measure_workload``)."""
    turn = slowest([rank["seconds"] for rank in ranks])
    overhead = slowest([rank["forward_overhead"] for rank in ranks])
    seconds = {variant: median(values) for variant, values in turn.items()}
    added = {
        variant: median(a - b for a, b in zip(overhead[variant], overhead["bare"], strict=True))
        for variant in ("torch", "ours")
    }
    return {
        "parameters": ranks[0]["parameters"],
        "steps_per_turn": ranks[0]["steps_per_turn"],
        "seconds": seconds,
        "bound_seconds": max(seconds["bare"], seconds["all_reduce"]),
        "ours_over_torch": median(a / b for a, b in zip(turn["ours"], turn["torch"], strict=True)),
        "forward_overhead_seconds": added,
        "forward_overhead_ratio": added["ours"] / added["torch"],
        "gradient_bytes": ranks[0]["gradient_bytes"],
        "bucket_bytes": ranks[0]["bucket_bytes"],
    }


def slowest(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """By variant and round, the time of the slowest rank."""
    return {
        variant: [max(times) for times in zip(*(rank[variant] for rank in ranks), strict=True)]
        for variant in ranks[0]
    }


def geometric_mean(ratios: list[float]) -> float:
    """The mean of ratios: of 2 and 1/2 it is 1."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def table(result: dict[str, Any]) -> str:
    """What ``bench`` returned, as text to print."""
    head = "workload parameters bare all-reduce bound torch ours ours/torch"
    more = "workload torch ours ours/torch gradients buckets"
    steps, extras = [head.split()], [more.split()]
    for name, r in result["workloads"].items():
        s, f = r["seconds"], r["forward_overhead_seconds"]
        times = s["bare"], s["all_reduce"], r["bound_seconds"], s["torch"], s["ours"]
        ratio = f"{r['ours_over_torch']:.3f}"
        steps.append([name, f"{r['parameters']:,}", *(f"{1e3 * t:.3f}" for t in times), ratio])
        forward = [f"{1e6 * f[v]:.1f}" for v in ("torch", "ours")]
        sizes = [f"{r[k]:,}" for k in ("gradient_bytes", "bucket_bytes")]
        extras.append([name, *forward, f"{r['forward_overhead_ratio']:.3f}", *sizes])
    steps.append(["geometric mean", *[""] * 6, f"{result['ours_over_torch']:.3f}"])
    ranks, rounds = result["nprocs"], result["rounds"]
    lines = [
        f"Ranks: {ranks}, one thread each. Rounds: {rounds}. torch {result['torch_version']}.",
        "",
        "Milliseconds per step (median over rounds; ours/torch: of the ratios in a round)",
        *aligned(steps),
        "",
        "Microseconds that a wrapper adds to a forward call; bytes of gradients and of buckets",
        *aligned(extras),
    ]
    return "\n".join(lines + ladder_table(result["workloads"]))


def ladder_table(workloads: dict[str, dict[str, Any]]) -> list[str]:
    """Times up the ladder, a line for each wrapper; nothing where they were not measured."""
    columns = [figures["seconds"] for figures in workloads.values()]
    if not columns[0].keys() >= WRAPPERS.keys():
        return []
    rows = [["wrapper", *workloads]]
    for name in WRAPPERS:
        rows.append([name, *(f"{1e3 * seconds[name]:.3f}" for seconds in columns)])
    return ["", "Milliseconds per step, up the ladder", *aligned(rows)]


def aligned(rows: list[list[str]]) -> list[str]:
    """The rows as lines: first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('bench: ')}\n")


def number(text: str) -> int | str:
    """``text`` as a whole number where it is one; ``check`` says what is wrong with the rest."""
    with contextlib.suppress(ValueError):
        return int(text)
    return text


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the top of this file."""
    about = "Time the bare model, torch's class and ddp_teach's side by side."
    parser = Parser("ddp_teach.bench", description=about, allow_abbrev=False)
    parser.add_argument("--rounds", type=number, default=21, help="21 if not given")
    parser.add_argument("--nprocs", type=number, default=2, help="number of ranks; 2 if not given")
    names = f"one of {', '.join(WORKLOADS)}; may be given several times; all if not given"
    parser.add_argument("--workload", action="append", dest="workloads", metavar="NAME", help=names)
    parser.add_argument("--ladder", action="store_true", help="every step of the ladder, too")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    given = parser.parse_args(arguments)
    call = given.workloads or list(WORKLOADS), given.rounds, given.nprocs
    try:
        check(*call)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what ranks may print
            result = bench(*call, ladder=given.ladder)
    except LaunchError as error:
        sys.exit(str(error))
    if not dist.is_initialized() or dist.get_rank() == 0:  # torchrun runs this on every rank
        print(json.dumps(result, indent=2) if given.json else table(result))


if __name__ == "__main__":
    main()
