"""Models that learners' wrappers are tried on: small, each with something that is easily missed.

``data(rank, number)`` makes inputs of shape ``[4, 8]`` that differ by rank and iteration. Every
parameter has at least eight elements, enough to conclude what its gradient is made of.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 8


def data(rank: int, number: int) -> Tensor:
    """Random inputs, always the same ones for this rank and number."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, WIDTH, generator=generator)


def whole_numbers(rank: int, number: int) -> Tensor:
    """Inputs for ``Weights``, of shape ``[1, 8]``: they are the gradient. First comes the rank
    plus 1, times 10 for every number."""
    first = (rank + 1.0) * 10**number
    generator = torch.Generator().manual_seed(1000 * number + rank)
    rest = torch.randint(1, 9, (1, WIDTH - 1), generator=generator)
    return torch.cat([torch.tensor([[first]]), rest], dim=1)


class Weights(nn.Module):
    """Eight weights, and sixteen more: every row of a gradient is the sum of the inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(rows, WIDTH)) for rows in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.first.t(), x @ self.second.t()], dim=1)


def layers() -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, WIDTH),
    )


class Tied(nn.Module):
    """The first and the last layer share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh())


class Frozen(nn.Module):
    """A frozen layer between two that learn, and a frozen number with a dtype of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(1, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).tanh() * self.scale.float())


class Dtypes(nn.Module):
    """float32, float64, bfloat16 and float32 in turn."""

    def __init__(self):
        super().__init__()
        dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float32
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x.to(layer.weight.dtype)) for layer in self.layers], dim=1)


class Buffers(nn.Module):
    """Batch norm, and buffers of other kinds: whole numbers, a mask, one that is None."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked.random_(1000)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.register_buffer("seen", torch.randint(1000, (2,)))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.scale + self.mask


class Twice(nn.Module):
    """Two layers, one of them used twice, so that its gradient comes in two parts."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.first(x)).tanh())


class EitherWay(nn.Module):
    """a(b(x)) on rank 0, b(a(x)) on the others, so that gradients get ready in another order."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if dist.get_rank() == 0 else (self.a, self.b)
        return second(first(x).tanh())
