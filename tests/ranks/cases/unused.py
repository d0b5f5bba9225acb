"""Unused parameters and control flow that differs between ranks."""

import torch
from models import chain, line
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

DETECT = {"find_unused_parameters": True}
NAMES_B = error(RuntimeError, "b.weight")
UNFINISHED = error(RuntimeError, "Expected to have finished reduction")
LOCAL_A = by_rank([1.0, None], [2.0, None])
LOCAL_BOTH = by_rank([1.0, 1.0], [2.0, 2.0])
BOTH = ("plain", "view", "small")


def step(model, rank, optimizer):
    backward(model, rank)
    optimizer.step()
    return "stepped"


@case([NAMES_B, [1.5, None], 1.0], torch=["stepped", LOCAL_A, by_rank(0.0, -1.0)])
def undetected_before_the_optimizer_steps(wrap, rank):
    model = wrap(Two(only_a))
    outcome = attempt(step, model, rank, sgd(model))
    return [outcome, grads(model), model.module.a.weight.item()]


@case([[1.5, None], NAMES_B], torch=[LOCAL_A, UNFINISHED])
def undetected_before_the_next_forward(wrap, rank):
    model = wrap(Two(only_a))
    backward(model, rank)
    return [grads(model), attempt(backward, model, rank)]


@case([NAMES_B, [1.5, 1.5]], torch=UNFINISHED)
def undetected_then_used_again(wrap, rank):
    model = wrap(Two(only_a))
    outcome = attempt(step, model, rank, sgd(model))
    model.zero_grad()
    model.module.way = lambda two, x: two.a(x) + two.b(x)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    backward(model, rank)
    return [outcome, grads(model)]


@case([[1.5, 1.0], by_rank(NAMES_B, None)], torch=HANGS, alone=True)
def undetected_on_one_rank(wrap, rank):
    model = wrap(Two(lambda two, x: two.a(x) + (two.b(x) if rank == 1 else 0)))
    backward(model, rank)
    return [grads(model), attempt(sgd(model).step)]


@case([[1.5, None], [3.0, 7.0]], variants=BOTH)
def unused_on_all_ranks(wrap, rank):
    model = wrap(Two(only_a), **DETECT)
    backward(model, rank)
    first = grads(model)
    model.module.b.weight.grad = torch.full((1, 1), 7.0)
    backward(model, rank)
    return [first, grads(model)]


@case([[0.5, 1.0], [1.0, 2.0]], variants=BOTH)
def each_used_on_one_rank(wrap, rank):
    model = wrap(Two(lambda two, x: (two.a if rank == 0 else two.b)(x)), **DETECT)
    backward(model, rank)
    first = grads(model)
    backward(model, rank)
    return [first, grads(model)]


@case([[4.5, 3.0]] * 3, variants=BOTH)
def used_in_different_order(wrap, rank):
    def way(two, x):
        return two.b(two.a(x)) if rank == 0 else two.a(two.b(x))

    two = Two(way)
    two.a, two.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    nn.init.eye_(two.a.weight).data.mul_(2)
    nn.init.eye_(two.b.weight).data.mul_(3)
    model, seen = wrap(two), []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()
        seen.append([p.grad[0, 0].item() for p in model.parameters()])
    return seen


def without_parameters_on_rank_0(wrap, rank, **options):
    model = wrap(Two(lambda two, x: two.a(x) if rank == 1 else x * 1), **options)
    model(x(rank).requires_grad_()).sum().backward()
    return grads(model)


@case([1.0, None], torch=HANGS, alone=True)
def no_parameter_on_one_rank(wrap, rank):
    return without_parameters_on_rank_0(wrap, rank, **DETECT)


@case([1.0, None], torch=by_rank([None, None], [2.0, None]))
def no_parameter_on_one_rank_undetected(wrap, rank):
    return without_parameters_on_rank_0(wrap, rank)


@case([[1.5, None], [None, 1.5], [1.5, None]], variants=BOTH)
def another_one_in_every_step(wrap, rank):
    model, seen = wrap(Two(only_a), **DETECT), []
    for way in (only_a, only_b, only_a):
        model.module.way = way
        model.zero_grad()
        backward(model, rank)
        seen.append(grads(model))
    return seen


@case([[1.5, None], [3.0, None]])
def output_unused_in_the_loss(wrap, rank):
    model = wrap(Two(lambda two, x: (two.a(x), two.b(x))), **DETECT)
    seen = []
    for _ in range(2):
        model(x(rank))[0].sum().backward()
        seen.append(grads(model))
    return seen


@case([by_rank([1.0, None], [2.0, None]), [3.0, 1.5]])
def no_sync_with_detection(wrap, rank):
    model = wrap(Two(only_a), **DETECT)
    with model.no_sync():
        backward(model, rank)
    local = grads(model)
    model.module.way = lambda two, x: two.a(x) + two.b(x)
    backward(model, rank)
    return [local, grads(model)]


@case([[1.5, None], [3.0, None]])
def unused_in_a_static_graph(wrap, rank):
    model = wrap(Two(only_a), static_graph=True)
    backward(model, rank)
    first = grads(model)
    backward(model, rank)
    return [first, grads(model)]


@case([[1.5, None, None], [3.0, None, None]])
def all_reduces_skipped_for_buckets_not_used(wrap, rank):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = chain("a", "b", "c")

        def forward(self, x):
            return self.layers.a(x)

    options = {"skip_all_reduce_unused_params": True, "bucket_cap_mb_list": [1e-6]}
    model, seen = wrap(First(), **DETECT, **options), []
    for _ in range(2):
        backward(model, rank)
        seen.append([grad(p) for p in model.parameters()])
    return seen


@case([1.5, 1.5], torch=LOCAL_BOTH)
def undetected_but_used_in_no_sync(wrap, rank):
    model = wrap(Two(only_a))
    with model.no_sync():
        backward(model, rank)
    model.module.way = only_b
    backward(model, rank)
    return grads(model)


@case([[1.5, None], NAMES_B], torch=[LOCAL_A, None])
def backward_into_some_parameters_only(wrap, rank):
    model = wrap(Two(lambda two, x: two.a(x) + two.b(x)))
    model(x(rank)).sum().backward(inputs=[model.module.a.weight])
    return [grads(model), attempt(sgd(model).step)]


@case([[1.5, 0.0], error(RuntimeError, "b.weight", "static_graph")], torch=[LOCAL_A, None])
def used_no_longer_in_a_static_graph(wrap, rank):
    model = wrap(Two(lambda two, x: two.a(x) + two.b(x)), static_graph=True)
    backward(model, rank)
    model.zero_grad()
    model.module.way = only_a
    backward(model, rank)
    return [grads(model), attempt(sgd(model).step)]


CHANGED = error(RuntimeError, "Your training graph has changed in this iteration")


@case(
    [error(RuntimeError, "Your training graph has changed", "b.weight"), 1.0], torch=[CHANGED, 1.0]
)
def used_at_last_in_a_static_graph(wrap, rank):
    model = wrap(Two(only_a), static_graph=True)
    backward(model, rank)
    model.module.way = only_b
    return [attempt(step, model, rank, sgd(model)), model.module.b.weight.item()]


@case([NAMES_B, [1.5, None], 1.0], torch=["stepped", LOCAL_A, by_rank(0.0, -1.0)])
def undetected_in_the_closure_of_an_optimizer(wrap, rank):
    model = wrap(Two(only_a))

    def closure():
        backward(model, rank)
        return 0.0

    def step():
        sgd(model).step(closure)
        return "stepped"

    return [attempt(step), grads(model), model.module.a.weight.item()]


@case([3, 0.25])  # the mean of the losses is 2.5 w^2
def an_optimizer_with_a_closure(wrap, rank):
    model, losses = wrap(line()), []

    def closure():
        model.zero_grad()
        loss = model(x(rank)).square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    optimizer.step(closure=closure)
    return [len(losses), model.module.weight.item()]
