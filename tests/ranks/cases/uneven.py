"""Uneven work: ranks with different numbers of inputs, and of samples."""

import torch
import torch.distributed as dist
from models import line
from torch import nn

from cases import (
    HANGS,
    Two,
    attempt,
    backward,
    by_rank,
    case,
    error,
    grad,
    grads,
    only_a,
    only_b,
    sgd,
    x,
)

BOTH = ("plain", "view", "small")
END = -3.6667


def train(model, rank, steps, **how):
    """SGD with rate 1 in ``join``; the gradient in every step, and the weight at the end."""
    optimizer, seen = sgd(model), []
    with model.join(**how):
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model, rank)
            seen.append(round(grad(model.module.weight), 4))
            optimizer.step()
    return [seen, round(model.module.weight.item(), 4)]


@case(by_rank([[1.5], -1.5], [[1.5, 1.0], -1.5]), variants=BOTH)
def dividing_by_the_world_size(wrap, rank):
    return train(wrap(line()), rank, rank + 1)


@case(by_rank([[1.5], -2.5], [[1.5, 2.0], -2.5]), variants=BOTH)
def dividing_by_the_ranks_still_active(wrap, rank):
    return train(wrap(line()), rank, rank + 1, divide_by_initial_world_size=False)


@case([by_rank([[1.5], -2.5], [[1.5, 2.0], -2.5]), 1.5])
def afterwards_the_world_size_counts_again(wrap, rank):
    model = wrap(line())
    joined = train(model, rank, rank + 1, divide_by_initial_world_size=False)
    model.zero_grad()
    backward(model, rank)
    return [joined, grad(model.module.weight)]


@case(by_rank([[2.0], END], [[2.0, 1.6667], END], [[2.0, 1.6667, 1.0], END]), nprocs=3)
def three_ranks(wrap, rank):
    return train(wrap(line()), rank, rank + 1)


@case(by_rank([[], -1.0], [[1.0, 1.0], -1.0]))
def no_input_at_all_on_one_rank(wrap, rank):
    return train(wrap(line()), rank, 2 * rank)


@case([[], 1.0])
def no_input_on_any_rank(wrap, rank):
    return train(wrap(line()), rank, 0)


@case(by_rank([[1.5, 1.5], -2.0], [[1.5, 1.5], -2.0]))
def as_many_on_every_rank(wrap, rank):
    return train(wrap(line()), rank, 2)


@case([by_rank([[1.5], -1.5], [[1.5, 1.0], -1.5]), by_rank([[1.5, 0.5], -3.5], [[1.5], -3.5])])
def join_twice(wrap, rank):
    model = wrap(line())
    return [train(model, rank, rank + 1), train(model, rank, 2 - rank)]


@case([[1.5, 1.5], -2.0])
def not_enabled(wrap, rank):
    return train(wrap(line()), rank, 2, enable=False)


@case([error(RuntimeError, "exhausted"), 1.5])
def ending_early_when_asked_to(wrap, rank):
    model = wrap(line())
    outcome = attempt(lambda: train(model, rank, rank + 1, throw_on_early_termination=True))
    model.zero_grad()
    backward(model, rank)
    return [outcome, grad(model.module.weight)]


@case([3.0, by_rank(None, 2.0)])
def no_sync_in_join(wrap, rank):
    """Rank 0 takes one step of two micro-batches, rank 1 two."""
    model, seen = wrap(line()), [None, None]
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            with model.no_sync():
                backward(model, rank)
            backward(model, rank)
            seen[step] = grad(model.module.weight)
    return seen


@case(
    [[1.5, None], by_rank(None, [None, 1.0])],
    torch=[[1.5, None], by_rank(None, [0.0, 1.0])],  # zero, not None: an optimizer may move it
    variants=BOTH,
)
def detection_in_join(wrap, rank):
    model, seen = wrap(Two(only_a), find_unused_parameters=True), [None, None]
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            model.module.way = (only_a, only_b)[step]
            backward(model, rank)
            seen[step] = grads(model)
    return seen


@case([by_rank(1.0, 2.0), 10.0])
def buffers_in_join(wrap, rank):
    """A rank that goes on sees the buffers of one that goes on as well."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = line()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count += 1
            return self.layer(x)

    model = wrap(Counts())
    with model.join():
        for _ in range(rank + 1):
            backward(model, rank)
            count = model.module.count.item()
    return [count, 8.0 + model.module.count.item()]


@case([error(ValueError, "on every rank"), 1.5])
def an_exception_in_join_on_all_ranks(wrap, rank):
    model = wrap(line())

    def fail():
        with model.join():
            backward(model, rank)
            raise ValueError("on every rank")

    outcome = attempt(fail)
    model.zero_grad()
    backward(model, rank)
    return [outcome, grad(model.module.weight)]


@case([1.5, 1.75])
def mean_of_means_and_mean_over_samples(wrap, rank):
    """Rank 0 has one sample of 1, rank 1 three of 2: the wrapper gives the mean of means; to get
    that over samples, weigh every rank's loss with its number of samples."""
    data = x(rank) if rank == 0 else torch.full((3, 1), 2.0)
    model = wrap(line())
    model(data).mean().backward()
    of_means = grad(model.module.weight)
    model.zero_grad()
    samples = torch.tensor(float(len(data)))
    dist.all_reduce(samples)
    (model(data).sum() * dist.get_world_size() / samples).backward()
    return [of_means, grad(model.module.weight)]


@case(by_rank([1.5], [1.5, 1.0]), torch=HANGS, alone=True)
def an_evaluation_in_join(wrap, rank):
    model, seen = wrap(line()), []
    with model.join():
        for _ in range(rank + 1):
            model.zero_grad()
            backward(model, rank)
            seen.append(grad(model.module.weight))
            with torch.no_grad():
                model(x(rank))
    return seen


@case([[1.5, None], None], torch=HANGS, alone=True)
def no_input_for_a_static_graph_on_one_rank(wrap, rank):
    model = wrap(Two(only_a), static_graph=True)
    with model.join():
        for _ in range(2 * rank):
            backward(model, rank)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    return [grads(model), attempt(sgd(model).step)]


@case(
    error(RuntimeError, "b.weight"),
    torch=error(RuntimeError, "Expected to have finished reduction"),
)
def an_unused_parameter_in_join(wrap, rank):
    model = wrap(Two(only_a))
    with model.join():
        for _ in range(rank + 1):
            backward(model, rank)
