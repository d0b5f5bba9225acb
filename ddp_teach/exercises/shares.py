"""Gradients that tell what they were made of: how much of which batch of which rank.

Batch number n of rank r holds one number to look at, (r + 1) times a factor, and a 1 in a place
that no other batch has. The gradient of a ``Branches`` parameter is the sum of the batches it was
used with. So every place of it reads as a share: 1 where a batch came in whole, 1/2 where it was
averaged over two ranks, 0 where it did not come in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.exercises.probe import Finding, Learner, values_of

RANKS = 3  # at most
FACTORS = (1, 2, 3, 10, 20, 2, 3, 4, 20, 30, 3, 4, 5, 30, 40)  # of the batches, by number
SMALLEST = 1 / 2**20  # MiB: a bucket of its own for every parameter


def batch(rank: int, number: int) -> Tensor:
    """One dimension: the number to look at, and a 1 in this batch's place."""
    x = torch.zeros(1 + RANKS * len(FACTORS))
    x[0] = (rank + 1) * FACTORS[number]
    x[1 + rank * len(FACTORS) + number] = 1
    return x


def shares(gradient: Tensor | None) -> list[list[float]]:
    """``shares(gradient)[rank][number]`` is how much of that batch came in."""
    if gradient is None:
        return [[0.0] * len(FACTORS) for _ in range(RANKS)]
    return [[round(n, 3) for n in row] for row in gradient[1:].view(RANKS, -1).tolist()]


def near(a: float, b: float) -> bool:
    return abs(a - b) < 2e-3


def number_text(gradient: Tensor | None) -> str:
    """The number to look at."""
    return "None" if gradient is None else f"{round(gradient[0].item(), 2):g}"


class Branches(nn.Module):
    """The sum of those of the branches a, b and c that ``use`` names; each has one parameter."""

    def __init__(self):
        super().__init__()
        size = len(batch(0, 0))
        self.a, self.b, self.c = (nn.Parameter(torch.ones(size)) for _ in "abc")

    def forward(self, x: Tensor, use: str = "abc") -> Tensor:
        return sum((getattr(self, name) * x).sum() for name in use)


@dataclass
class Seen:
    """What one rank saw at one moment. ``used``: by parameter, the batches it was used with since
    gradients were zeroed. ``averaged``: the batches that must have been averaged by now. ``none``:
    whether a gradient to which nothing was added must be ``None``."""

    where: str
    gradients: dict[str, Tensor | None]
    used: dict[str, frozenset[int]]
    averaged: frozenset[int]
    none: bool


class Trial:
    """A wrapper around ``Branches`` in use; ``seen`` is the evidence."""

    def __init__(self, learner: Learner, module: Branches | None = None, **options: Any):
        self.learner, self.seen = learner, []
        self.wrapper = learner.wrap(module or Branches(), **options)
        self.forget()

    def forget(self, set_to_none: bool = True) -> None:
        """Zero the gradients."""
        self.wrapper.zero_grad(set_to_none)
        self.none = set_to_none
        self.used: dict[str, frozenset[int]] = dict.fromkeys("abc", frozenset())
        self.averaged: frozenset[int] = frozenset()

    def forward(self, number: int, what: str, use: str = "abc", advice: str = "") -> Tensor:
        """The output for batch ``number`` of this rank; its backward is expected next."""
        self.learner.doing(f"the forward pass of {what}", advice)
        for name in use:
            self.used[name] |= {number}
        output = self.wrapper(batch(dist.get_rank(), number), use=use)
        self.learner.doing(f"the backward pass of {what}", advice)
        return output

    def step(self, number: int, what: str, use: str = "abc", advice: str = "") -> None:
        """A forward and a backward pass."""
        self.forward(number, what, use, advice).backward()

    def look(self, where: str, averaged: bool) -> None:
        """Note all gradients; ``averaged`` tells whether all so far must have been averaged."""
        self.learner.meet()
        if averaged:
            self.averaged = frozenset().union(*self.used.values())
        gradients = {name: values_of(p.grad) for name, p in self.wrapper.module.named_parameters()}
        self.seen.append(Seen(where, gradients, dict(self.used), self.averaged, self.none))


@dataclass
class Difference:
    """A gradient that is not what it should be; lists have an entry for every rank."""

    seen: list[Seen]
    name: str
    expected: list[Tensor | None]
    got: list[Tensor | None]

    def __post_init__(self):
        self.world_size, self.where = len(self.seen), self.seen[0].where
        self.used = [seen.used[self.name] for seen in self.seen]  # by rank

    def users(self, number: int) -> list[int]:
        """The ranks that used the parameter with their batch of this number."""
        return [rank for rank, numbers in enumerate(self.used) if number in numbers]

    def columns(self, number: int) -> list[list[float]]:
        """On every rank: how much of this batch of each rank came in."""
        return [[row[number] for row in shares(g)][: self.world_size] for g in self.got]

    def letters(self) -> str:
        """What was made of each batch so far, in order; see ``letter``."""
        return "".join(map(self.letter, sorted(frozenset().union(*self.used))))

    def letter(self, number: int) -> str:
        """What was made of this batch of every rank: (m)ean, (l)ocal, (s)um, (0) nothing,
        (2) twice the mean, (d)ivided twice, (+) the mean on top of the local one, or (?)."""
        n, columns = self.world_size, self.columns(number)
        own = {column[r] for r, column in enumerate(columns)}
        others = {share for r, c in enumerate(columns) for k, share in enumerate(c) if k != r}
        names = {(1, 0): "l", (1, 1): "s", (0, 0): "0", (1 / n, 1 / n): "m", (2 / n, 2 / n): "2"}
        names |= {(1 + 1 / n, 1 / n): "+"}
        if len(own) == len(others) == 1:
            a, b = own.pop(), others.pop()
            return next((names[x, y] for x, y in names if near(a, x) and near(b, y)), "?")
        return "?"

    def ratio(self) -> float | None:
        """How many times too large everything is, on all ranks alike; ``None`` if it is not so."""
        ratios = {
            round(share * self.world_size, 2)
            for number in frozenset().union(*self.used)
            for column in self.columns(number)
            for share in column
        }
        return ratios.pop() if len(ratios) == 1 else None

    def strangers(self) -> bool:
        """Whether a batch came in that the parameter was not used with since zero_grad()."""
        return any(
            share and number not in self.used[rank]
            for gradient in self.got
            for rank, row in enumerate(shares(gradient)[: self.world_size])
            for number, share in enumerate(row)
        )

    def finding(self, hint: str) -> Finding:
        """The numbers, and what they tell."""
        where = f"first number of the gradient of {self.name} {self.where}"
        expected, got = (tuple(map(number_text, side)) for side in (self.expected, self.got))
        return Finding(hint, where, expected, got)


def differences(evidence: Sequence[Sequence[Seen]]) -> Iterator[Difference]:
    """All gradients that are not as they should be, in the order of time."""
    for seen in zip(*evidence, strict=True):
        for name in seen[0].gradients:
            expected = [expected_gradient(name, rank, seen) for rank in range(len(seen))]
            got = [s.gradients[name] for s in seen]
            if any(not right(g, e, seen[0].none) for g, e in zip(got, expected, strict=True)):
                yield Difference(list(seen), name, expected, got)


def expected_gradient(name: str, rank: int, seen: Sequence[Seen]) -> Tensor | None:
    """The mean over all ranks of what was to be averaged, and the rank's own other batches."""
    parts = [
        batch(r, n) / len(seen) if n in s.averaged else batch(r, n)
        for r, s in enumerate(seen)
        for n in sorted(s.used[name])
        if n in s.averaged or r == rank
    ]
    return sum(parts) if parts else None


def right(got: Tensor | None, expected: Tensor | None, none: bool) -> bool:
    """Whether the gradient is the expected one; zeros may do for ``None``."""
    if expected is None:
        return got is None or not (none or got.any())
    return got is not None and torch.allclose(got, expected, rtol=1e-3, atol=1e-3)
