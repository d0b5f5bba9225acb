"""What a gradient was made of, concluded from the numbers alone.

Whatever a wrapper does with gradients is nearly always a weighted sum: the mean of two ranks is
0.5 of each, a plain sum 1 of each, a gradient that was never sent 1 of the rank's own. The weights
are found by least squares, so a mistake that nobody has thought of is still described rightly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_teach.exercises.training import Gradients, Step

Part = tuple[str, int, str]  # ("local", "newest", "last" or "before", rank, parameter)
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-9}  # relative
ROUNDING = 1e-4


@dataclass(frozen=True)
class Mixture:
    """The weight of every part that a gradient was made of; those of weight 0 are left out."""

    weights: dict[Part, float]

    def of_ranks(self, name: str, world_size: int) -> list[float]:
        """The weight of every rank's local gradient of this parameter."""
        return [self.weights.get(("local", rank, name), 0.0) for rank in range(world_size)]

    def others(self, name: str) -> dict[Part, float]:
        """All parts that are not this parameter's local gradients of this iteration."""
        return {p: w for p, w in self.weights.items() if p[0] != "local" or p[2] != name}


def expected_gradients(steps: Sequence[Step]) -> Gradients:
    """By parameter: the mean over ranks of what this iteration adds, and of what was there before;
    ``None`` where no rank has any."""
    expected: Gradients = {}
    for name in steps[0].local:
        found = [g for step in steps for g in (step.local[name], step.before[name])]
        expected[name] = None
        if any(g is not None for g in found):
            total = sum(g.to(high(g)) for g in found if g is not None)
            like = next(g for g in found if g is not None)
            expected[name] = (total / len(steps)).to(like.dtype)
    return expected


def high(tensor: Tensor) -> torch.dtype:
    """The dtype to compute with: float64, or complex128."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def close(got: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
    """Equal within rounding, measured against the largest number in ``expected``."""
    if got.shape != expected.shape:
        return False
    tolerance = TOLERANCE.get(expected.dtype, ROUNDING) if tolerance is None else tolerance
    off = (got.to(high(got)) - expected.to(high(expected))).abs()
    scale = expected.to(high(expected)).abs().max() if expected.numel() else 0.0
    return bool((off <= tolerance * scale + 1e-12).all())


def mixture_of(
    name: str, rank: int, steps: Sequence[Step], last: Sequence[Step] | None
) -> Mixture | None:
    """What ``name``'s gradient on ``rank`` was made of; ``None`` if nothing fits, or if several
    mixtures would."""
    got = steps[rank].after[name]
    if got is None or got.is_complex() or not got.isfinite().all():
        return None
    target = got.double().flatten()
    for parts in candidates(name, rank, steps, last):
        weights = fit(list(parts.values()), target, TOLERANCE.get(got.dtype, ROUNDING))
        if weights is not None:
            return Mixture({p: w for p, w in zip(parts, weights, strict=True) if w})
    return None


def candidates(
    name: str, rank: int, steps: Sequence[Step], last: Sequence[Step] | None
) -> Iterator[dict[Part, Tensor]]:
    """Sets of parts that may explain a gradient, the likely ones first."""
    local = parts_of("local", steps, name)
    yield local
    before = steps[rank].before[name]
    if before is not None and before.any():
        local[("before", rank, name)] = before.double().flatten()
        yield local
    if steps[rank].newest:
        yield parts_of("newest", steps, name)
    if last:
        yield local | parts_of("last", last, name)
    numel = steps[rank].after[name].numel()
    for other, gradient in steps[rank].local.items():
        if other != name and gradient is not None and gradient.numel() == numel:
            yield local | parts_of("local", steps, other)


def parts_of(kind: str, steps: Sequence[Step], name: str) -> dict[Part, Tensor]:
    """Every rank's local gradient of one parameter; ``None`` counts as zero, and is left out."""
    found = "newest" if kind == "newest" else "local"
    gradients = {(kind, rank, name): getattr(s, found)[name] for rank, s in enumerate(steps)}
    return {part: g.double().flatten() for part, g in gradients.items() if g is not None}


def fit(parts: list[Tensor], target: Tensor, tolerance: float) -> list[float] | None:
    """The one list of weights with which ``parts`` add up to ``target``; ``None`` without one."""
    if not parts or len(parts) > len(target):
        return None
    matrix = torch.stack(parts, dim=1)
    scale = matrix.norm(dim=0).clamp(min=1e-300)
    if torch.linalg.matrix_rank(matrix / scale, rtol=1e-3) < len(parts):
        return None
    weights = torch.linalg.lstsq(matrix / scale, target.unsqueeze(1)).solution.squeeze(1) / scale
    if (matrix @ weights - target).abs().max() > tolerance * matrix.abs().max():
        return None
    return rounded(weights.tolist())


def rounded(weights: list[float]) -> list[float]:
    """To three digits after the point; to more where all are small."""
    largest = max(map(abs, weights))
    digits = 3 - min(math.floor(math.log10(largest)) + 1, 0) if largest else 3
    return [round(weight, digits) for weight in weights]
