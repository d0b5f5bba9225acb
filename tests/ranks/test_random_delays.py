"""Whatever rank is slow, and wherever: training gives the same numbers to the bit."""

import hashlib
import time
from contextlib import nullcontext

import pytest
import random_delays
import torch
import torch.distributed as dist
from models import batch, loss_of
from specs import Branching
from torch import Tensor, nn

from ddp_teach import DistributedDataParallel, launch


class Slow(nn.Module):
    """Sleeps on rank 3 only, in forward and, as a hook of the gradient, in backward."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 3:
            time.sleep(0.02)
            x.register_hook(lambda gradient: time.sleep(0.02))
        return x


class SlowBranching(Branching):
    def __init__(self, width: int):
        super().__init__(width)
        self.last = nn.Sequential(Slow(), self.last, Slow())


def train(build: type[nn.Module] = Branching) -> tuple[list[str], int]:
    """A fingerprint of all parameters after every step, and how often this rank was delayed.

    Micro-batches in ``no_sync``, parameters that are used on some ranks or on none, and in the end
    ``join`` with as many inputs as the rank's number.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank)
    options = {"bucket_cap_mb_list": [1e-4], "find_unused_parameters": True}
    model = DistributedDataParallel(build(3), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []

    def step(number: int, micro_batches: int) -> None:
        optimizer.zero_grad()
        for i in range(micro_batches):
            with model.no_sync() if i + 1 < micro_batches else nullcontext():
                loss_of(model(batch(rank, 10 * number + i), step=number)).backward()
        optimizer.step()
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        seen.append(hashlib.sha256(bits).hexdigest()[:8])

    for number in range(6):
        step(number, micro_batches=1 + number % 3)
    with model.join():
        for number in range(rank):
            step(6 + number, micro_batches=1)
    return seen, random_delays.slept


def numbers_of(*args, **kwargs) -> list[list[str]]:
    return [seen for seen, _ in launch(train, *args, **kwargs)]


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_delays_at_random_points(nprocs):
    undisturbed = numbers_of(nprocs=nprocs)
    with random_delays.random_delays(seed=nprocs):
        delayed = launch(train, nprocs=nprocs)
    assert all(slept > 10 for _, slept in delayed)
    assert [seen for seen, _ in delayed] == undisturbed


def test_one_of_eight_ranks_is_slow():
    slow = numbers_of(SlowBranching, nprocs=8)
    assert slow == numbers_of(nprocs=8)
    first, *others = (seen[5] for seen in slow)  # before join
    assert others == [first] * 7
