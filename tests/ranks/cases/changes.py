"""Parameters that change after wrapping: their gradient must not stay local in silence."""

import torch
from models import line
from pytest import approx
from torch import nn

from cases import EVERY, Two, attempt, backward, by_rank, case, chained, error, grad, grads, sgd, x

LOCAL = by_rank(1.0, 2.0)
WRAP_AGAIN = "Wrap the model again"
UNFINISHED = error(RuntimeError, "Expected to have finished reduction")
WEIGHT = error(RuntimeError, "weight", WRAP_AGAIN)
WEIGHT_DOES_NOT_FIT = error(RuntimeError, "The gradient of weight can't be sent")


@case(
    error(RuntimeError, "a.weight", WRAP_AGAIN),
    torch=[LOCAL, 1.5],
    variants=("plain", "view", "unused"),
)
def unfrozen(wrap, rank):
    two = Two(chained)
    two.a.weight.requires_grad_(False)
    model = wrap(two)
    two.a.weight.requires_grad_(True)
    backward(model, rank)
    return grads(model)


@case(error(RuntimeError, "a.weight", WRAP_AGAIN), torch=[LOCAL, 1.5])
def unfrozen_after_some_steps(wrap, rank):
    two = Two(chained)
    two.a.weight.requires_grad_(False)
    model = wrap(two)
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
    model.zero_grad()
    two.a.weight.requires_grad_(True)
    backward(model, rank)
    return grads(model)


@case([WEIGHT, None], torch=[None, LOCAL])
def replaced(wrap, rank):
    model = wrap(line())
    model.module.weight = nn.Parameter(torch.ones(1, 1))
    outcome = attempt(backward, model, rank)
    return [outcome, None if outcome else grad(model.module.weight)]


@case([by_rank(1.0, 2.0), WEIGHT], torch=[by_rank(1.0, 2.0), None])
def replaced_and_then_no_sync(wrap, rank):
    model = wrap(line())
    model.module.weight = nn.Parameter(torch.ones(1, 1))
    with model.no_sync():
        backward(model, rank)
    return [grad(model.module.weight), attempt(backward, model, rank)]


@case(WEIGHT, torch=LOCAL, variants=("plain", "view", "unused", "static"))
def loaded_with_assign(wrap, rank):
    model = wrap(line())
    backward(model, rank)
    model.load_state_dict({"module.weight": torch.ones(1, 1)}, assign=True)
    backward(model, rank)
    return grad(model.module.weight)


@case(WEIGHT, torch=LOCAL)
def a_whole_layer_replaced(wrap, rank):
    model = wrap(Two(chained))
    model.module.b = line()
    backward(model, rank)
    return grad(model.module.b.weight)


@case(error(RuntimeError, "b.weight", WRAP_AGAIN), torch=[1.5, LOCAL])
def a_tie_cut_in_one_place(wrap, rank):
    two = Two(chained)
    two.b.weight = two.a.weight
    model = wrap(two)
    two.b.weight = nn.Parameter(torch.ones(1, 1))
    backward(model, rank)
    return grads(model)


@case(error(RuntimeError, "c.weight", WRAP_AGAIN), torch=[1.5, 1.5, LOCAL])
def added(wrap, rank):
    model = wrap(Two(lambda two, x: two.c(two.b(two.a(x)))))
    model.module.c = line()
    backward(model, rank)
    return grads(model)


@case([error(RuntimeError, "a.weight", WRAP_AGAIN), 1.0], torch=["stepped", LOCAL])
def unfrozen_and_no_step_is_taken(wrap, rank):
    two = Two(chained)
    two.a.weight.requires_grad_(False)
    model = wrap(two)
    two.a.weight.requires_grad_(True)
    optimizer = sgd(model)

    def step():
        backward(model, rank)
        optimizer.step()
        return "stepped"

    outcome = attempt(step)
    return [outcome, two.a.weight.item() if outcome != "stepped" else grad(two.a.weight)]


@case([[None, 1.5], error(RuntimeError, "a.weight")], torch=[[None, LOCAL], UNFINISHED])
def frozen(wrap, rank):
    model = wrap(Two(chained))
    model.module.a.weight.requires_grad_(False)
    backward(model, rank)
    return [grads(model), attempt(backward, model, rank)]


@case([[None, 1.5], [None, 1.5]], variants=("unused",))
def frozen_with_detection(wrap, rank):
    model, seen = wrap(Two(chained), find_unused_parameters=True), []
    model.module.a.weight.requires_grad_(False)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        seen.append(grads(model))
    return seen


@case([["torch.float64", 1.5]] * 2, torch=[["torch.float64", LOCAL]] * 2)
def made_double(wrap, rank):
    model, seen = wrap(line()).double(), []
    for _ in range(2):
        model.zero_grad()
        model(x(rank).double()).sum().backward()
        seen.append([str(model.module.weight.grad.dtype), grad(model.module.weight)])
    return seen


@case(["torch.float64", 1.5], torch=["torch.float64", LOCAL], variants=EVERY)
def made_double_after_a_step(wrap, rank):
    model = wrap(line())
    backward(model, rank)
    model.zero_grad()
    model.double()
    model(x(rank).double()).sum().backward()
    return [str(model.module.weight.grad.dtype), grad(model.module.weight)]


@case(1.5)
def loaded_in_place(wrap, rank):
    model = wrap(line())
    model.load_state_dict({"module.weight": torch.full((1, 1), 5.0)})
    backward(model, rank)
    return grad(model.module.weight)


@case([1.5, 1.5, 1.5])
def another_wrapper_around_the_same_module(wrap, rank):
    two, seen = Two(chained), []
    for _ in range(3):  # torch's advice: make a new wrapper when the parameters change
        model = wrap(two)
        two.zero_grad()
        backward(model, rank)
        seen.append(grad(two.a.weight))
        del model
    return seen


@case([1.5, by_rank(1.0, 2.0)])
def trained_without_the_wrapper(wrap, rank):
    model = wrap(line())
    backward(model, rank)
    first = grad(model.module.weight)
    model.zero_grad()
    backward(model.module, rank)
    return [first, grad(model.module.weight)]


@case(
    WEIGHT_DOES_NOT_FIT,
    torch=error(RuntimeError, "invalid gradient"),
    variants=("plain", "view", "small"),
)
def a_parameter_made_larger(wrap, rank):
    table = nn.Embedding(1000, 64)
    model = wrap(table)
    table.weight.data = torch.ones(1200, 64)
    ((rank + 1) * model(torch.arange(1200))).sum().backward()
    return sorted(set(table.weight.grad.flatten().tolist()))


def one_layer_of_another_dtype(wrap, rank, convert):
    """The gradient of a layer that keeps float32, 1.5e-9: too small for half a float's bits."""
    two = Two(lambda two, x: two.b(x) + two.a(x.half()).float())
    model, seen = wrap(two), []
    convert(two)
    for _ in range(2):
        model.zero_grad()
        (1e-9 * model(x(rank))).sum().backward()
        seen.append(grad(two.b.weight))
    return seen


@case(
    [approx(1.5e-9)] * 2,
    torch=[by_rank(approx(1e-9), approx(2e-9))] * 2,
    variants=("plain", "view", "unused"),
)
def one_layer_kept_in_float32(wrap, rank):
    def convert(two):
        two.half()
        two.b.float()

    return one_layer_of_another_dtype(wrap, rank, convert)


@case([approx(1.5e-9)] * 2, torch=UNFINISHED)
def one_layer_made_half(wrap, rank):
    return one_layer_of_another_dtype(wrap, rank, lambda two: two.a.half())


CANT_SWAP = "wap"  # "Couldn't swap Linear.weight", "While swapping the parameter ..."


def after_a_swap(wrap, rank, change):
    """The gradient before and after ``change``, which gives parameters new tensors in place."""
    model, before = wrap(line()), torch.__future__.get_swap_module_params_on_conversion()
    backward(model, rank)
    seen = [grad(model.module.weight)]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        outcome = attempt(change, model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    if outcome is not None:
        return outcome
    for _ in range(2):
        model.zero_grad()
        model(x(rank).to(model.module.weight.dtype)).sum().backward()
        seen.append(grad(model.module.weight))
    return seen


@case([1.5] * 3, torch=error(RuntimeError, CANT_SWAP), variants=EVERY)
def converted_by_swapping(wrap, rank):
    return after_a_swap(wrap, rank, lambda model: model.double() and None)


@case([1.5] * 3, torch=error(RuntimeError, CANT_SWAP), variants=EVERY)
def loaded_by_swapping(wrap, rank):
    state = {"module.weight": torch.full((1, 1), 5.0)}
    return after_a_swap(wrap, rank, lambda model: model.load_state_dict(state) and None)


@case([[None, 1.5], [1.5, 1.5]], torch=[[None, LOCAL], [LOCAL, LOCAL]], variants=("unused",))
def frozen_while_converted_and_unfrozen(wrap, rank):
    model, seen = wrap(Two(chained)), []
    backward(model, rank)
    model.module.a.weight.requires_grad_(False)
    model.double()
    for trained in (False, True):
        model.module.a.weight.requires_grad_(trained)
        model.zero_grad()
        model(x(rank).double()).sum().backward()
        seen.append(grads(model))
    return seen


@case([WEIGHT, 1.0], torch=[None, by_rank(0.0, -1.0)])
def the_wrapped_module_replaced(wrap, rank):
    model = wrap(line())
    model.module = line()
    optimizer = sgd(model)

    def step():
        backward(model, rank)
        optimizer.step()

    return [attempt(step), model.module.weight.item()]
