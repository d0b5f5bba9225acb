"""What an all-reduce costs: the alpha-beta model, and its fit to what was measured.

A message of b bytes takes alpha + b / beta seconds: a latency, however small it is, and then its
bytes at some bandwidth. In a ring all-reduce over n ranks every rank sends 2 (n - 1) messages, one
after the other, each an n-th of the tensor: once around to add up, once more to hand out the sums.

    2 (n - 1) alpha  +  2 (n - 1) / n * bytes / beta

The second part hardly grows with n, which is why rings are used; the first grows with it, which is
why buckets are large. (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 2009.)

On one machine sending is the processors' work. Where ranks outnumber the cores they take turns, and
everything takes as many times longer as there are ranks to a core.

``rank_sweep`` measures what is to be fitted; ``clusters`` has published figures of larger machines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Network:
    """``alpha``: seconds that a message takes however small it is. ``beta``: bytes per second from
    one rank to the next. ``cores``: how many ranks can send at the same time. ``source``: who says
    so."""

    alpha: float
    beta: float
    cores: float = inf
    source: str = ""


class Sample(NamedTuple):
    """One all-reduce: over so many ``ranks``, of so many bytes, took so many seconds."""

    ranks: int
    nbytes: int
    seconds: float


def all_reduce_seconds(nbytes: float, ranks: int, network: Network, messages: int = 1) -> float:
    """Seconds for all-reduces of ``nbytes`` in all, sent in so many ``messages`` (buckets).

    Raises ``ValueError`` for fewer than one rank or message, or a negative number of bytes.
    """
    if ranks < 1 or messages < 1 or nbytes < 0:
        raise ValueError(
            f"ranks and messages must be at least 1 and nbytes at least 0, got ranks={ranks}, "
            f"messages={messages}, nbytes={nbytes}."
        )
    latency = messages * 2 * (ranks - 1) * network.alpha
    turns = max(ranks / network.cores, 1.0)
    return turns * (latency + 2 * (ranks - 1) / ranks * nbytes / network.beta)


def step_bounds(compute: float, all_reduce: float) -> tuple[float, float]:
    """Seconds of a step: at best, all that can overlap does; at worst, nothing does."""
    return max(compute, all_reduce), compute + all_reduce


def efficiency(compute: float, step: float) -> float:
    """The share of a step in which a rank does what it would do alone: 1.0 scales perfectly."""
    return compute / step


def fit(samples: Sequence[Sample], cores: float = inf, rounds: int = 50) -> Network:
    """The alpha and beta with which the model comes closest to ``samples``, on so many ``cores``.

    Least squares of the logarithms: twice as long is as wrong as half as long, for small tensors as
    for large ones. Raises ``ValueError`` for fewer than two samples over two ranks or more.
    """
    used = [s for s in samples if s.ranks > 1]
    if len(used) < 2:
        raise ValueError(f"fit needs two samples over at least 2 ranks, but got {len(used)}.")
    units = Network(1.0, inf, cores), Network(0.0, 1.0, cores)
    parts = np.array([[all_reduce_seconds(s.nbytes, s.ranks, u) for u in units] for s in used])
    seconds = np.array([s.seconds for s in used])
    logs = np.log(np.median(seconds[:, None] / parts, axis=0) / 2)  # of alpha and of 1 / beta
    for _ in range(rounds):  # Gauss-Newton
        terms = parts * np.exp(logs)
        modelled = terms.sum(axis=1)
        slopes = terms / modelled[:, None]
        step, *_ = np.linalg.lstsq(slopes, np.log(seconds / modelled), rcond=1e-6)
        logs += np.clip(step, -1, 1)
    alpha, per_byte = np.exp(logs)
    return Network(float(alpha), float(1 / per_byte), cores, "fitted")


def relative_error(sample: Sample, network: Network) -> float:
    """How far the model is above (+) or below (-) what was measured, as a share of the latter."""
    return all_reduce_seconds(sample.nbytes, sample.ranks, network) / sample.seconds - 1


def errors_by_ranks(samples: Iterable[Sample], network: Network) -> dict[int, float]:
    """For every number of ranks the median size of the relative errors."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.ranks, []).append(abs(relative_error(sample, network)))
    return {ranks: median(errors) for ranks, errors in sorted(found.items())}


def table(samples: Sequence[Sample], network: Network) -> str:
    """Measured beside modelled, milliseconds, with the error, for every number of ranks."""
    lines = [f"{'ranks':>5} {'bytes':>10} {'measured ms':>12} {'model ms':>9} {'error':>7}"]
    for s in samples:
        modelled = 1e3 * all_reduce_seconds(s.nbytes, s.ranks, network)
        error = f"{100 * relative_error(s, network):+.0f} %"
        lines.append(
            f"{s.ranks:5} {s.nbytes:10,} {1e3 * s.seconds:12.3f} {modelled:9.3f} {error:>7}"
        )
    lines.append("")
    lines.append(f"fitted: alpha {1e6 * network.alpha:.1f} microseconds, ")
    lines[-1] += f"beta {network.beta / 1e9:.2f} GB/s"
    for ranks, error in errors_by_ranks(samples, network).items():
        lines.append(f"{ranks} ranks: median error {100 * error:.0f} %")
    return "\n".join(lines)
