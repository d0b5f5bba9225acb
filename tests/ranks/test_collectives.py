"""count_collectives sees every collective of a block, in Python and in C++, and changes nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_teach import DistributedDataParallel
from ddp_teach.collectives import count_collectives
from ddp_teach.launch import launch

TorchDDP = nn.parallel.DistributedDataParallel


def by_hand():
    rank = dist.get_rank()
    numbers = torch.tensor([rank, 10.0])
    parts = [torch.zeros(3) for _ in range(2)]
    dist.all_reduce(numbers)
    with count_collectives() as collectives:
        numbers.add_(1)
        dist.all_reduce(numbers[:1], async_op=True).wait()
        dist.broadcast(numbers, src=0)
        dist.all_gather(parts, torch.full((3,), float(rank)))
        dist.barrier()
    dist.all_reduce(numbers)
    return collectives.started, numbers.tolist(), [part.tolist() for part in parts]


def test_collectives_of_the_block_are_listed_in_order_with_their_bytes():
    for started, numbers, parts in launch(by_hand):
        assert started[:3] == [("all_reduce", 4), ("broadcast", 8), ("all_gather", 24)]
        assert [name for name, _ in started[3:]] == ["barrier"]
        assert numbers == [8.0, 42.0] and parts == [[0.0] * 3, [1.0] * 3]


def two_backwards(wrapper, counted):
    torch.manual_seed(0)
    model = wrapper(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=300 / 2**20)
    counts = []
    for _ in range(2):
        x = torch.randn(4, 8) + dist.get_rank()
        if counted:
            with count_collectives() as collectives:
                model(x).square().mean().backward()
            counts.append((collectives.count("all_reduce"), collectives.nbytes("all_reduce")))
        else:
            model(x).square().mean().backward()
    return counts, [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("wrapper", [TorchDDP, DistributedDataParallel], ids=["torch", "ours"])
def test_collectives_started_during_backward_are_counted_and_gradients_stay_the_same(wrapper):
    nbytes = 2 * (8 * 8 + 8) * 4
    counted, uncounted = launch(two_backwards, wrapper, True), launch(two_backwards, wrapper, False)
    for (counts, grads), (none, same_grads) in zip(counted, uncounted, strict=True):
        assert counts == [(1, nbytes), (2, nbytes)], "one bucket until the order is known, then two"
        assert none == [] and grads == same_grads


def broken_off():
    with pytest.raises(ZeroDivisionError), count_collectives() as collectives:
        dist.all_reduce(torch.ones(1))
        1 / 0  # noqa: B018
    dist.all_reduce(torch.ones(1))
    return collectives.started


def test_after_an_exception_nothing_more_is_counted():
    assert launch(broken_off) == [[("all_reduce", 4)]] * 2
