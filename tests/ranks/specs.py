"""Trainings drawn at random: spec number n is always the same one, so that it can be run alone."""

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, batch, loss_of
from torch import Tensor, nn

STEPS = 4


@dataclass(frozen=True)
class Spec:
    """``model`` is a key of ``BUILDERS``, ``size`` how deep or wide it is, ``options`` are the
    wrapper's. ``micro_batches`` are accumulated in a step, all but the last in ``no_sync``."""

    number: int
    nprocs: int
    model: str
    size: int
    micro_batches: int
    set_to_none: bool
    optimizer: str
    options: dict[str, Any] = field(hash=False)


def draw(number: int) -> Spec:
    """The spec of that number."""
    rng = random.Random(number)
    model, micro_batches = rng.choice(list(BUILDERS)), rng.choice([1, 1, 2, 3])
    options: dict[str, Any] = {}
    size = rng.choice(["default", "cap", "list"])
    if size == "cap":
        options["bucket_cap_mb"] = rng.choice([1e-6, 1e-4, 3e-4, 1e-3, 0.01, 1, 25])
    elif size == "list":
        options["bucket_cap_mb_list"] = rng.choice([[1e-4], [1e-6, 1e-3], [1e-3, 1e-4, 0.1]])
    for name in ("gradient_as_bucket_view", "batched_grad_copy"):
        if rng.random() < 0.4:
            options[name] = True
    if rng.random() < 0.3:
        options["forward_sync_buffers"] = rng.random() < 0.5
    if model == "branching" or rng.random() < 0.25:
        options["find_unused_parameters"] = True
        options["skip_all_reduce_unused_params"] = rng.random() < 0.2
    elif micro_batches == 1 and rng.random() < 0.3:  # torch's class can't begin with no_sync there
        options["static_graph"] = True
    return Spec(
        number,
        nprocs=rng.choice([2, 2, 3, 4]),
        model=model,
        size=rng.randint(1, 4),
        micro_batches=micro_batches,
        set_to_none=rng.random() < 0.5,
        optimizer=rng.choice(["SGD", "Adam"]),
        options=options,
    )


def differences(numbers: list[int]) -> dict[int, list[str]]:
    """In a rank: by number, which tensors of a model are not the same to the bit after training
    with our class and with torch's."""
    from ddp_teach import DistributedDataParallel

    found = {}
    for number in numbers:
        ours = train(draw(number), DistributedDataParallel)
        theirs = train(draw(number), nn.parallel.DistributedDataParallel)
        found[number] = [
            f"{name}: {(value != theirs[name]).sum()} of {value.numel()} numbers"
            for name, value in ours.items()
            if not same_bits(value, theirs[name])
        ]
        dist.barrier()
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) and bool(a.isfinite().all())


def train(spec: Spec, wrapper: type[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers after some steps, and the gradients of the last."""
    rank = dist.get_rank()
    torch.manual_seed(100 * spec.number + rank)  # ranks start from different weights
    model = wrapper(BUILDERS[spec.model](spec.size), **spec.options)
    optimizer = optimizer_of(spec, [p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=spec.set_to_none)
        for micro_batch in range(spec.micro_batches):
            last = micro_batch + 1 == spec.micro_batches
            with nullcontext() if last else model.no_sync():
                extra = {"step": step} if spec.model == "branching" else {}
                loss_of(model(batch(rank, 10 * step + micro_batch), **extra)).backward()
        optimizer.step()
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {
        name: t.detach().clone() for name, t in [*model.state_dict().items(), *gradients.items()]
    }


def optimizer_of(spec: Spec, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if spec.optimizer == "Adam":
        return torch.optim.Adam(params, lr=0.01, foreach=False)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mlp(depth: int) -> nn.Module:
    layers = [layer for k in range(depth) for layer in (nn.Linear(4 + 8 * (k > 0), 12), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(12, 3))


def convolution(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4 * width, 2, padding=1),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.Conv2d(4 * width, 4, 2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def channels_last(width: int) -> nn.Module:
    return convolution(width).to(memory_format=torch.channels_last)


class Transformer(nn.Module):
    """The batch is one sequence; with dropout, so the random numbers have to be the same ones."""

    def __init__(self, depth: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x).unsqueeze(0))).squeeze(0)


class Branching(nn.Module):
    """Every step takes another branch, not the same one on every rank; the last is never taken."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(width + 2))

    def forward(self, x: Tensor, step: int) -> Tensor:
        choice = (step + dist.get_rank() // 2 * (step % 2)) % (len(self.branches) - 1)
        return self.last(self.branches[choice](self.first(x)).relu())


BUILDERS = {
    "mlp": mlp,
    "convolution": convolution,
    "channels_last": channels_last,
    "transformer": Transformer,
    "branching": Branching,
    **{name: lambda _, build=MODELS[name]: build() for name in ("tied", "frozen", "dtypes")},
    **{name: lambda _, build=MODELS[name]: build() for name in ("odd_shapes", "buffers")},
}
