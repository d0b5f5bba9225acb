"""Training steps with the wrapper that go wrong on a rank, for the tests of what is told then."""

import threading
import time
from functools import partial

import torch
import torch.distributed as dist
from failing import end_by
from torch import nn

from ddp_teach import DistributedDataParallel as DDP

ROW = torch.ones(1, 4)


def layers():
    return [nn.Linear(4, 4, bias=False) for _ in range(3)]


def wrap(*modules, **options):
    """Three buckets, one for each layer, sent from the last layer to the first."""
    return DDP(nn.Sequential(*modules), bucket_cap_mb_list=[1e-5], **options)


def step(model):
    model(ROW).sum().backward()


# A rank goes wrong. ``fault()`` is what happens on rank 1.


class InForward(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        self.fault()
        return x


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fault()
        return gradient, None


class BetweenLayers(InForward):
    def forward(self, x):
        return InBackward.apply(x, self.fault)


def before_the_first_collective(fault):
    fault()
    step(wrap(*layers()))


def in_forward(fault):
    first, *others = layers()
    step(wrap(first, InForward(fault), *others))


def in_backward(fault):
    first, *others = layers()
    model = wrap(first, BetweenLayers(fault), *others)
    step(model)


def in_backward_hook(fault):
    """Once one bucket of three has been sent, in the second step."""
    first, second, third = layers()
    model = wrap(first, second, third)
    step(model)
    second.weight.register_hook(lambda gradient: fault())
    step(model)


def in_a_collective(fault):
    """Ranks 0 and 1 wait for a bucket that rank 2 does not send."""
    model = wrap(*layers())
    if dist.get_rank() == 2:
        time.sleep(100)
    timer = threading.Timer(0.3, fault)
    timer.start()
    step(model)


def in_a_communication_hook(fault):
    """The all-reduce has just been started, on all ranks."""

    def hook(_state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        fault()
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    model = wrap(*layers())
    model.register_comm_hook(None, hook)
    step(model)


PLACES = [
    before_the_first_collective,
    in_forward,
    in_backward,
    in_backward_hook,
    in_a_collective,
    in_a_communication_hook,
]


def go_wrong(place, how, folder):
    """Leave word when the fault happens."""

    def fault():
        if dist.get_rank() == 1:
            (folder / "fault").touch()
            end_by(how)

    place(fault)


# Nothing fails, and nothing goes on.


def skips_backward():
    """Rank 1 does, in the second step."""
    model = wrap(*layers())
    step(model)
    loss = model(ROW).sum()
    if dist.get_rank() != 1:
        loss.backward()


def loops():
    model = wrap(*layers())
    step(model)
    while dist.get_rank() == 1:
        pass
    step(model)


def one_collective_too_many():
    """On rank 0, which logs alone, after the step."""
    model = wrap(*layers())
    step(model)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def one_collective_too_many_before():
    """On rank 0, before the step, of as many numbers as a bucket has."""
    model = wrap(*layers())
    step(model)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(16))
    step(model)


def stops_in_forward():
    """Rank 1 does, and nobody can ask it."""
    in_forward(lambda: end_by("SIGSTOP") if dist.get_rank() == 1 else None)


def in_groups():
    """Ranks 0 and 1 train a model, ranks 2 and 3 another; rank 3 misses a step."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model = wrap(*layers(), process_group=groups[dist.get_rank() // 2])
    step(model)
    if dist.get_rank() != 3:
        step(model)


def joined():
    """Rank 0 has one input, rank 1 has two and loops instead of the second backward pass."""
    model = wrap(*layers())
    with model.join():
        step(model)
        if dist.get_rank() == 1:
            loss = model(ROW).sum()
            while True:
                time.sleep(0.01)
            loss.backward()


def in_another_thread():
    """Where a backward pass on a GPU runs."""
    model = wrap(*layers())
    if dist.get_rank() == 0:
        thread = threading.Thread(target=partial(step, model))
        thread.start()
        thread.join()
