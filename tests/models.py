"""Models that the tests train: small, each with something that a wrapper can get wrong.

Those in ``MODELS`` take ``x`` of shape ``[n, 4]``, float32, and return ``[n, k]``. ``batch`` makes
data that differs by rank and iteration.
"""

import torch
from torch import Tensor, nn


def batch(rank: int, iteration: int, n: int = 6) -> Tensor:
    """Inputs of shape ``[n, 4]`` for one rank in one iteration, always the same ones."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn(n, 4, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """A mean over samples, so that equal shards average to the loss of the whole batch."""
    return output.double().square().sum(1).mean()


def line(weight: float = 1.0) -> nn.Linear:
    """One weight, no bias: the mean gradient for x = rank + 1 can be worked out in the head."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def chain(*names: str) -> nn.Sequential:
    """A ``line`` for every name, one after the other."""
    model = nn.Sequential()
    for name in names:
        model.add_module(name, line())
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def one_matrix() -> nn.Linear:
    return nn.Linear(4, 50, bias=False)


class WithBuffers(nn.Module):
    """Buffers of several kinds, and one that is None; the output depends on two of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("seen", torch.randint(1000, (1,)))
        self.register_buffer("every_second", torch.randn(6)[::2])
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.mask


class Tied(nn.Module):
    """The first and the last layer share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh())


class Frozen(nn.Module):
    """A frozen layer between two that learn, and a frozen parameter with a dtype of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.temperature = nn.Parameter(torch.rand(1, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).tanh() * self.temperature.float())


class MixedDtypes(nn.Module):
    """float32, float64, bfloat16, complex64 and float32 in turn, side by side, so that each
    gradient has the precision of its own dtype."""

    def __init__(self):
        super().__init__()
        dtypes = torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float32
        self.layers = nn.ModuleList(nn.Linear(4, 2, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x.to(layer.weight.dtype)) for layer in self.layers]
        return torch.cat([y.abs() if y.is_complex() else y for y in outputs], dim=1)


class ChannelsLast(nn.Module):
    """Convolutions whose weights lie in memory channels last, and a transposed matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2, padding=1), nn.Conv2d(4, 3, 2)
        self.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(2, 12).div(4).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.view(-1, 1, 2, 2))).flatten(1) @ self.turned


class OddShapes(nn.Module):
    """Parameters of shape [], [1, 1] and [0] beside an ordinary one."""

    def __init__(self):
        super().__init__()
        self.scalar, self.one = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1, 1))
        self.none, self.layer = nn.Parameter(torch.randn(0)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scalar + self.one + self.none.sum()


MODELS = {
    "mlp": mlp,
    "one_matrix": one_matrix,
    "buffers": WithBuffers,
    "tied": Tied,
    "frozen": Frozen,
    "dtypes": MixedDtypes,
    "channels_last": ChannelsLast,
    "odd_shapes": OddShapes,
}


class Boom(torch.autograd.Function):
    """The identity, whose backward raises ``ValueError``."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ValueError("boom")


class Fragile(nn.Module):
    """Layers a, b and c, all ``line``. With ``breaks=True``, backward raises after c; b is left out
    where ``skip_b=True``."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = line(), line(), line()

    def forward(self, x: Tensor, breaks: bool = False, skip_b: bool = False) -> Tensor:
        x = self.a(x)
        x = x if skip_b else self.b(x)
        return self.c(Boom.apply(x) if breaks else x)
