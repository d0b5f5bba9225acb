"""Parameters that change after wrapping: their gradient must not stay local in silence."""

import torch
from models import line
from torch import nn

from cases import EVERY, Two, attempt, backward, by_rank, case, chained, error, grad, grads, sgd, x

LOCAL = by_rank(1.0, 2.0)
WRAP_AGAIN = "Wrap the model again"
UNFINISHED = error(RuntimeError, "Expected to have finished reduction")
WEIGHT = error(RuntimeError, "weight", WRAP_AGAIN)


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
