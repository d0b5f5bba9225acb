"""Accumulation and no_sync: the forward pass decides whether a backward pass synchronises."""

import torch
import torch.distributed as dist
from models import Boom, line

from cases import (
    EVERY,
    Two,
    Wrapped,
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

NOT_STATIC = EVERY[:4]
ASSERTS = {"static": error(RuntimeError, "INTERNAL ASSERT FAILED")}  # torch's, at first no_sync
UNDEFINED = error(RuntimeError, "Encountered gradient which is undefined")
LOCAL = by_rank(11.5, 21.5)  # the first gradient stays local, the mean of the second is added


@case(3.0, torch=ASSERTS, variants=EVERY)
def two_micro_batches_the_last_synchronised(wrap, rank):
    model = wrap(line())
    with model.no_sync():
        backward(model, rank)
    backward(model, rank)
    return grad(model.module.weight)


@case([4.5, 9.0, 4.5], torch=ASSERTS, variants=EVERY)
def three_micro_batches_in_three_steps(wrap, rank):
    model, seen = wrap(line()), []
    for set_to_none in (False, True, True):
        with model.no_sync():
            backward(model, rank)
            backward(model, rank)
        backward(model, rank, factor=4.0 if len(seen) == 1 else 1.0)
        seen.append(grad(model.module.weight))
        model.zero_grad(set_to_none=set_to_none)
    return seen


@case(16.5, torch=LOCAL, variants=NOT_STATIC)
def forward_in_no_sync_backward_outside_then_another(wrap, rank):
    model = wrap(line())
    with model.no_sync():
        first = model(x(rank)).sum()
    second = model(x(rank, 10)).sum()
    first.backward()
    second.backward()
    return grad(model.module.weight)


@case([by_rank(16.0, 17.0), 18.0])
def backward_through_no_sync_after_a_synchronised_one(wrap, rank):
    model = wrap(line())
    with model.no_sync():
        local = model(x(rank)).sum()
    model(x(rank, 10)).sum().backward()
    local.backward()
    before = grad(model.module.weight)
    backward(model, rank)
    return [before, grad(model.module.weight)]


@case(16.5, torch=LOCAL, variants=EVERY)
def two_forwards_then_two_backwards(wrap, rank):
    model = wrap(line())
    first, second = model(x(rank)).sum(), model(x(rank, 10)).sum()
    first.backward()
    second.backward()
    return grad(model.module.weight)


@case(16.5, torch=by_rank(16.0, 17.0), variants=EVERY)
def two_forwards_then_two_backwards_the_last_first(wrap, rank):
    model = wrap(line())
    first, second = model(x(rank)).sum(), model(x(rank, 10)).sum()
    second.backward()
    first.backward()
    return grad(model.module.weight)


@case(16.5, variants=EVERY)
def two_forwards_in_one_loss(wrap, rank):
    model = wrap(line())
    (model(x(rank)) + model(x(rank, 10))).sum().backward()
    return grad(model.module.weight)


@case(3.0, torch=by_rank(2.5, 3.5), variants=EVERY)
def backward_twice_through_a_retained_graph(wrap, rank):
    model = wrap(line())
    loss = model(x(rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return grad(model.module.weight)


def one_backward_for_each_loss(model, rank):
    """The gradients, and whether an optimizer may step."""
    model.zero_grad()
    for loss in model(x(rank)):
        loss.sum().backward(retain_graph=True)
    return [grads(model), attempt(sgd(model).step)]


@case([[1.5, 1.5], None], variants=("plain", "view", "small"))
def two_losses_with_a_backward_each(wrap, rank):
    return one_backward_for_each_loss(wrap(Two(lambda two, x: (two.a(x), two.b(x)))), rank)


READY_TWICE = error(RuntimeError, "Expected to mark a variable ready only once")


@case([[3.0, 1.5], None], torch=READY_TWICE, variants=("plain", "view", "small"))
def two_losses_with_layers_in_common(wrap, rank):
    def way(two, x):
        y = two.a(x)
        return y, two.b(y)

    return one_backward_for_each_loss(wrap(Two(way)), rank)


@case([[1.5, 1.5], None])
def two_forwards_that_use_different_layers(wrap, rank):
    model = wrap(Two(only_a))
    first = model(x(rank)).sum()
    model.module.way = only_b
    second = model(x(rank)).sum()
    first.backward()
    second.backward()
    return [grads(model), attempt(sgd(model).step)]


@case([[3.5, 1.5], None], torch=READY_TWICE)
def a_penalty_on_the_weights_before_the_loss(wrap, rank):
    model = wrap(Two(lambda two, x: two.b(two.a(x))))
    loss = model(x(rank)).sum()
    model.module.a.weight.square().sum().backward()
    loss.backward()
    return [grads(model), attempt(sgd(model).step)]


def a_while_accumulating(wrap, **options):
    """Layers a and b of which ``model.module.way`` uses one."""
    return wrap(Two(only_a), find_unused_parameters=True, **options)


@case([1.5, 1.5])
def used_only_in_no_sync(wrap, rank):
    model = a_while_accumulating(wrap)
    with model.no_sync():
        backward(model, rank)
    model.module.way = only_b
    backward(model, rank)
    return grads(model)


@case([[1.5, 1.5], [None, 1.5], [None, 1.5]], torch=UNDEFINED, variants=("plain", "view", "small"))
def not_used_since_zero_grad(wrap, rank):
    model, seen = a_while_accumulating(wrap), []
    with model.no_sync():
        backward(model, rank)
    model.module.way = only_b
    for _ in range(2):
        backward(model, rank)
        seen.append(grads(model))
        model.zero_grad()
    model.module.way = only_a
    with model.no_sync():
        backward(model, rank)
    model.zero_grad()
    model.module.way = only_b
    backward(model, rank)
    return [*seen, grads(model)]


@case([0.5, 1.5])
def used_in_no_sync_on_one_rank_only(wrap, rank):
    model = a_while_accumulating(wrap)
    model.module.way = only_a if rank == 0 else only_b
    with model.no_sync():
        backward(model, rank)
    model.module.way = only_b
    model.module.b.weight.grad = None
    backward(model, rank)
    return grads(model)


@case(1.5, variants=EVERY)
def after_an_exception_in_no_sync(wrap, rank):
    model = wrap(line())

    def fail():
        with model.no_sync():
            raise ValueError("in no_sync")

    attempt(fail)
    backward(model, rank)
    return grad(model.module.weight)


@case(1.5)
def after_an_exception_between_forward_and_backward_in_no_sync(wrap, rank):
    model = wrap(line())

    def fail():
        with model.no_sync():
            model(x(rank))
            raise ValueError("in no_sync")

    attempt(fail)
    backward(model, rank)
    return grad(model.module.weight)


@case(by_rank(2.0, 4.0), torch=ASSERTS, variants=EVERY)
def nested_no_sync(wrap, rank):
    model = wrap(line())
    with model.no_sync():
        with model.no_sync():
            backward(model, rank)
        backward(model, rank)
    return grad(model.module.weight)


@case([by_rank(1.0, 2.0), 3.0])
def the_flag_set_by_hand(wrap, rank):
    model = wrap(line())
    model.require_backward_grad_sync = False
    backward(model, rank)
    local = grad(model.module.weight)
    model.require_backward_grad_sync = True
    backward(model, rank)
    return [local, grad(model.module.weight)]


@case(by_rank(1.0, 2.0))
def only_the_backward_outside_no_sync(wrap, rank):
    model = wrap(line())
    with model.no_sync():
        loss = model(x(rank)).sum()
    loss.backward()
    return grad(model.module.weight)


@case(1.5)
def only_the_backward_inside_no_sync(wrap, rank):
    model = wrap(line())
    loss = model(x(rank)).sum()
    with model.no_sync():
        loss.backward()
    return grad(model.module.weight)


@case(3.0, variants=EVERY)
def nothing_left_of_an_earlier_step(wrap, rank):
    model = wrap(line())
    backward(model, rank)
    model.module.weight.grad = None
    with model.no_sync():
        backward(model, rank)
    backward(model, rank)
    return grad(model.module.weight)


@case([6.5, 8.0], variants=EVERY)
def a_gradient_set_by_the_user(wrap, rank):
    model = wrap(line())
    backward(model, rank)
    model.module.weight.grad = torch.full((1, 1), 5.0)
    backward(model, rank)
    first = grad(model.module.weight)
    backward(model, rank)
    return [first, grad(model.module.weight)]


@case([1.5] * 6)
def the_mean_on_every_path(wrap, rank):
    two_ranks = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(2)][rank]
    means = []
    for options in ({}, {"bucket_cap_mb": 1e-6}, {"process_group": two_ranks}):
        model = wrap(Two(lambda two, x: two.a(x) + two.b(x)), **options)
        backward(model, rank)
        means.append(grad(model.module.a.weight))
    model = wrap(line(), process_group=alone)
    backward(model, 0.5)
    means.append(grad(model.module.weight))
    model = wrap(line())
    with model.no_sync():
        backward(model, rank)
    model.zero_grad()
    backward(model, rank)
    means.append(grad(model.module.weight))
    model.zero_grad()
    with model.join():
        backward(model, rank)
    return [*means, grad(model.module.weight)]


@case(2.0, variants=EVERY, nprocs=3)
def the_mean_of_three_ranks(wrap, rank):
    model = wrap(line())
    backward(model, rank)
    return grad(model.module.weight)


@case(1.5, variants=NOT_STATIC)
def after_an_exception_in_the_backward_of_no_sync(wrap, rank):
    def kept(layer, x):
        features.append(layer(x))  # where no wrapper looks
        later = torch.clone if model.require_backward_grad_sync else Boom.apply
        return later(features[-1])

    model, features = wrap(Wrapped(kept)), []
    with model.no_sync():
        broken = model(x(rank))
    model(x(rank))
    attempt(broken.sum().backward)
    model.zero_grad()
    features[-1].sum().backward()
    return grad(model.module.layer.weight)
