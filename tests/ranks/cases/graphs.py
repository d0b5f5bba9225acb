"""Shapes of autograd graphs: tied weights, checkpoints, graphs of gradients, kept tensors."""

import gc
import math
import threading
import weakref

import torch
from models import Boom, Fragile, line
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks
from torch.utils.checkpoint import checkpoint

from cases import (
    EVERY,
    HANGS,
    Two,
    Wrapped,
    attempt,
    backward,
    by_rank,
    case,
    chained,
    error,
    grad,
    grads,
    numbers,
    sgd,
    x,
)

NOT_STATIC = EVERY[:4]


@case([3.0, True, 1], variants=EVERY)
def tied_weights(wrap, rank):
    two = Two(chained)
    two.b.weight = two.a.weight
    model = wrap(two)
    backward(model, rank)
    once = len(list(model.parameters()))
    return [grad(two.a.weight), two.a.weight is two.b.weight, once]


class Checkpointed(nn.Module):
    """d(b(a(x))), with b run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.d, self.reentrant = line(), line(), line(), reentrant

    def forward(self, x):
        return self.d(checkpoint(self.b, self.a(x), use_reentrant=self.reentrant))


def three_steps(model, rank):
    seen = []
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        seen.append(grads(model))
    return seen


@case([[1.5] * 3] * 3, variants=("plain", "view", "small", "static"))
def checkpoint_reentrant(wrap, rank):
    return three_steps(wrap(Checkpointed(True)), rank)


@case([[1.5] * 3] * 3, variants=EVERY)
def checkpoint_not_reentrant(wrap, rank):
    return three_steps(wrap(Checkpointed(False)), rank)


@case([[3.0]] * 3, variants=("static",))
def checkpoint_twice_in_a_static_graph(wrap, rank):
    def twice(layer, x):
        x = x.requires_grad_()
        return checkpoint(layer, x, use_reentrant=True) + checkpoint(layer, x, use_reentrant=True)

    return three_steps(wrap(Wrapped(twice), static_graph=True), rank)


@case(error(RuntimeError, "came after its bucket", "a.weight"), torch=[by_rank(2.5, 3.5), 1.5])
def checkpoint_twice_while_another_layer_finishes(wrap, rank):
    def way(two, x):
        x = x.requires_grad_()
        first, second = (checkpoint(two.a, x, use_reentrant=True) for _ in range(2))
        return first + second + two.b(x)

    model = wrap(Two(way))
    backward(model, rank)
    return grads(model)


@case([[1.5, 1.5]] * 2)
def checkpoint_around_the_wrapper(wrap, rank):
    model, seen = wrap(Two(chained)), []
    for reentrant in (False, True):
        model.zero_grad()
        data = x(rank).requires_grad_()
        checkpoint(model, data, use_reentrant=reentrant).sum().backward()
        seen.append(grads(model))
    return seen


@case(
    [error(RuntimeError, "in the middle of backward"), 1.0], torch=["stepped", by_rank(0.0, -1.0)]
)
def an_optimizer_that_steps_in_the_middle_of_backward(wrap, rank):
    model = wrap(Two(chained))
    weight = model.module.b.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(_param):
        optimizer.step()
        optimizer.zero_grad()

    weight.register_post_accumulate_grad_hook(step)
    outcome = attempt(backward, model, rank)
    return [outcome or "stepped", weight.item()]


@case([10.0, 20.0], variants=("plain", "view", "small"))
def create_graph(wrap, rank):
    model, seen = wrap(line(2.0)), []
    for _ in range(2):
        (model(x(rank)) ** 2).sum().backward(create_graph=True)
        seen.append(grad(model.module.weight))
    return seen


@case(1.5, variants=EVERY)
def exception_in_forward_then_a_normal_step(wrap, rank):
    def maybe(layer, x):
        if layer.fails:
            raise ValueError("in forward")
        return layer(x)

    model = wrap(Wrapped(maybe))
    model.module.layer.fails = True
    attempt(backward, model, rank)
    model.module.layer.fails = False
    backward(model, rank)
    return grad(model.module.layer.weight)


FAILED = error(ValueError, "boom")
STEPPED = [1.0, 1.0, by_rank(0.0, -1.0)]  # only c had a gradient, and a local one
INCOMPLETE = error(RuntimeError, "an exception broke the backward pass off")
UNFINISHED = error(RuntimeError, "Expected to have finished reduction")


@case(
    [[1.5] * 3, FAILED, [1.5] * 3, FAILED, [1.5] * 3],
    torch=[[1.5] * 3, FAILED, UNFINISHED, UNFINISHED, UNFINISHED],
    variants=NOT_STATIC,
)
def exception_in_the_middle_of_backward(wrap, rank):
    model, seen = wrap(Fragile()), []
    for breaks in (False, True, False, True, False):
        model.zero_grad()
        failed = attempt(three_layers, model, rank, breaks)
        seen.append(failed or grads(model))
    return seen


def three_layers(model, rank, breaks):
    model(x(rank), breaks=breaks).sum().backward()


@case(
    [[1.5] * 3, by_rank(INCOMPLETE, FAILED), [1.5] * 3, by_rank(FAILED, INCOMPLETE), [1.5] * 3],
    torch=HANGS,
    variants=NOT_STATIC,
    alone=True,
)
def exception_in_the_middle_of_backward_on_one_rank(wrap, rank):
    model, seen = wrap(Fragile()), []
    for breaks_on in (None, 1, None, 0, None):
        model.zero_grad()
        failed = attempt(three_layers, model, rank, rank == breaks_on)
        seen.append(failed or grads(model))
    return seen


@case([by_rank(INCOMPLETE, INCOMPLETE, FAILED), [2.0] * 3], torch=HANGS, alone=True, nprocs=3)
def exception_in_the_first_backward_on_one_of_three_ranks(wrap, rank):
    model = wrap(Fragile(), bucket_cap_mb_list=[1e-6])
    failed = attempt(three_layers, model, rank, rank == 2)
    model.zero_grad()
    backward(model, rank)
    return [failed, grads(model)]


class FragileAndEmpty(Fragile):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x, breaks=False):
        return super().forward(x, breaks) + self.empty.sum()


@case([by_rank(INCOMPLETE, FAILED), [[], 1.5, 1.5, 1.5]], torch=HANGS, alone=True)
def exception_on_one_rank_where_the_last_bucket_is_empty(wrap, rank):
    model = wrap(FragileAndEmpty(), bucket_cap_mb_list=[1e-6])
    backward(model, rank)
    model.zero_grad()
    failed = attempt(three_layers, model, rank, rank == 1)
    model.zero_grad()
    backward(model, rank)
    return [failed, [numbers(p.grad) for p in model.parameters()]]


@case(["nan", [1.5, 1.5]])
def a_gradient_that_is_not_a_number_is_averaged_like_any(wrap, rank):
    model = wrap(Two(chained))
    backward(model, rank, math.nan if rank == 1 else 1.0)
    first = str(grad(model.module.b.weight))
    model.zero_grad()
    backward(model, rank)
    return [first, grads(model)]


@case([FAILED, [1.5] * 3], torch=UNFINISHED)
def exception_in_the_middle_of_the_first_backward(wrap, rank):
    model = wrap(Fragile())
    failed = attempt(three_layers, model, rank, True)
    model.zero_grad()
    backward(model, rank)
    return [failed, grads(model)]


@case([1.5, None], torch=[by_rank(1.0, 2.0), None], variants=("plain", "view"))
def a_wrapper_that_is_gone_before_backward(wrap, rank):
    two = Two(chained)
    loss = wrap(two)(x(rank)).sum()
    gc.collect()
    loss.backward()
    return [grad(two.a.weight), attempt(sgd(two).step)]


@case(16.5, torch=by_rank(16.0, 17.0), variants=("plain", "small"))
def a_reentrant_checkpoint_of_the_wrapper_beside_it(wrap, rank):
    model, data = wrap(line()), x(rank, 10).requires_grad_()
    (model(x(rank)) + checkpoint(model, data, use_reentrant=True)).sum().backward()
    return grad(model.module.weight)


@case([1.5, None])
def an_input_returned_as_it_came_and_used_again(wrap, rank):
    model, data = (
        wrap(Wrapped(lambda layer, x: (x, layer(x)))),
        torch.ones(1, 1, requires_grad=True),
    )
    (model(data)[1] * (rank + 1)).sum().backward()
    if rank == 0:
        data.sum().backward()
    return [grad(model.module.layer.weight), attempt(sgd(model).step)]


@case([by_rank(FAILED, None), None, [1.5] * 3])
def autograd_grad_that_raises_on_one_rank(wrap, rank):
    model = wrap(Fragile())

    def fail():
        if rank == 0:
            torch.autograd.grad(model(x(rank), breaks=True).sum(), list(model.parameters()))

    failed = attempt(fail)
    stepped = attempt(torch.optim.SGD(model.parameters(), lr=1.0).step)
    backward(model, rank)
    return [failed, stepped, grads(model)]


@case([by_rank(1.0, None), None, 1.5], variants=("plain", "view", "unused"))
def backward_into_the_input_only_on_one_rank(wrap, rank):
    """For an adversarial example, say."""
    model, data = wrap(line()), x(rank).requires_grad_()
    if rank == 0:
        model(data).sum().backward(inputs=[data])
    stepped = attempt(sgd(model).step)
    backward(model, rank)
    return [grad(data), stepped, grad(model.module.weight)]


@case(
    [FAILED, [1.5, None, 1.5], None],
    torch=[FAILED, by_rank([1.0, None, 1.0], [2.0, None, 2.0]), None],
    variants=("static",),
)
def exception_in_the_first_backward_of_a_static_graph(wrap, rank):
    model = wrap(Fragile())
    failed = attempt(lambda: model(x(rank), breaks=True, skip_b=True).sum().backward())
    for _ in range(2):
        model.zero_grad()
        model(x(rank), skip_b=True).sum().backward()
    return [failed, grads(model), attempt(sgd(model).step)]


@case([1.5, 1.5])
def loss_kept_as_attribute(wrap, rank):
    def keep(layer, x):
        layer.loss = layer(x).sum()

    model, seen = wrap(Wrapped(keep)), []
    for _ in range(2):
        model.zero_grad()
        model(x(rank))
        model.module.layer.loss.backward()
        seen.append(grad(model.module.layer.weight))
    return seen


@case([1.5, 1.5])
def auxiliary_loss_beside_the_output(wrap, rank):
    def both(two, x):
        two.extra = two.b(x).sum()
        return two.a(x)

    model = wrap(Two(both))
    (model(x(rank)).sum() + model.module.extra).backward()
    return grads(model)


@case(16.5, torch=by_rank(11.5, 21.5))
def auxiliary_loss_with_a_backward_of_its_own(wrap, rank):
    def both(layer, x):
        layer.extra = layer(x).sum()
        return layer(10 * x)

    model = wrap(Wrapped(both))
    loss = model(x(rank)).sum()
    model.module.layer.extra.backward()
    loss.backward()
    return grad(model.module.layer.weight)


@case([1.5, 1.5])
def a_loss_that_takes_the_weight_itself(wrap, rank):
    model, seen = wrap(line()), []
    for _ in range(2):
        model.zero_grad()
        output = model(x(rank))
        ((rank + 1) * model.module.weight + 0 * output).sum().backward()
        seen.append(grad(model.module.weight))
    return seen


@case([1.5, 1.5])
def torch_autograd_backward_with_inputs(wrap, rank):
    model = wrap(Two(chained))
    model(x(rank)).sum().backward(inputs=list(model.parameters()))
    return grads(model)


@case([[1.0, 2.0], [None, None]])
def autograd_grad_leaves_gradients_alone(wrap, rank):
    model = wrap(Two(chained))
    got = torch.autograd.grad(model(x(rank)).sum(), list(model.parameters()))
    return [sorted({1.0, 2.0} | {numbers(g) for g in got}), grads(model)]


@case(1.5)
def autograd_grad_on_one_rank_only(wrap, rank):
    model = wrap(line())
    if rank == 0:
        data = x(rank).requires_grad_()
        torch.autograd.grad(model(data).sum(), data)
    backward(model, rank)
    return grad(model.module.weight)


@case([1.5, 1.5])
def autograd_grad_then_backward(wrap, rank):
    model = wrap(Two(chained))
    loss = model(x(rank)).sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return grads(model)


@case([1.5, 2.0])
def gradient_penalty(wrap, rank):
    model = wrap(line(2.0))
    data = x(rank).requires_grad_()
    output = model(data)
    (slope,) = torch.autograd.grad(output.sum(), data, create_graph=True)
    (output.sum() + 0 * slope.sum()).backward()
    return [grad(model.module.weight), numbers(slope)]


@case(1.5)
def evaluation_between_forward_and_backward(wrap, rank):
    model = wrap(line())
    loss = model(x(rank)).sum()
    with torch.no_grad():
        model(x(rank, 7))
    loss.backward()
    return grad(model.module.weight)


@case(1.5)
def inference_mode_before_training(wrap, rank):
    model = wrap(line())
    with torch.inference_mode():
        model(x(rank, 7))
    backward(model, rank)
    return grad(model.module.weight)


@case([None, 1.5])
def a_forward_whose_result_is_dropped(wrap, rank):
    model = wrap(line())
    dropped = model(x(rank, 7))
    del dropped
    backward(model, rank)
    return [None, grad(model.module.weight)]


@case([15.0, 15.0], variants=EVERY)
def hooks_of_the_user_put_on_after_wrapping_change_gradients(wrap, rank):
    model, seen = wrap(line()), []
    weight = model.module.weight
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 10 * p.grad))
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        seen.append(grad(weight))
    return seen


@case([15.0] * 3, variants=EVERY)
def a_hook_of_the_user_taken_off_and_put_on_again(wrap, rank):
    model, seen = wrap(line()), []
    weight = model.module.weight
    for _ in range(3):
        hook = weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 10 * p.grad))
        model.zero_grad()
        backward(model, rank)
        seen.append(grad(weight))
        hook.remove()
    return seen


@case(15.0, variants=EVERY)
def a_hook_of_the_user_put_on_between_forward_and_backward(wrap, rank):
    model = wrap(line())
    weight, loss = model.module.weight, model(x(rank)).sum()
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 10 * p.grad))
    loss.backward()
    return grad(weight)


@case([1.5, 1.5])
def hooks_of_the_user_see_local_gradients(wrap, rank):
    two, seen = Two(chained), []
    model = wrap(two)
    two.a.weight.register_hook(lambda g: seen.append(numbers(g)))
    backward(model, rank)
    return [grad(two.a.weight), seen[0] + 0.5 - rank]


@case(error(ValueError, "boom"))
def the_error_of_a_broken_backward_is_its_own(wrap, rank):
    model = wrap(Wrapped(lambda layer, x: Boom.apply(layer(x))))
    backward(model, rank)


@case([-0.5, -0.5])
def a_forward_alone_does_not_keep_an_optimizer_from_stepping(wrap, rank):
    model = wrap(Two(chained))
    backward(model, rank)
    model(x(rank))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return [p.item() for p in model.parameters()]


@case([FAILED, error(RuntimeError, "broken off"), [1.0] * 3], torch=[FAILED, None, STEPPED])
def an_exception_in_backward_and_then_a_step(wrap, rank):
    model = wrap(Fragile())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    failed = attempt(three_layers, model, rank, True)
    return [failed, attempt(optimizer.step), [p.item() for p in model.parameters()]]


@case([[1.5, None], [3.0, 1.5]] * 2, variants=EVERY)
def one_network_against_another(wrap, rank):
    """As in a GAN: both are trained in turn, the loss of the maker goes through the frozen judge,
    and a step is complete without it."""
    maker, judge, seen = wrap(line()), wrap(line(2.0)), []
    for _ in range(2):
        judge.requires_grad_(True)
        judge.zero_grad()
        judge(maker(x(rank)).detach()).sum().backward()
        torch.optim.SGD(judge.parameters(), lr=0.0).step()
        seen.append([grad(judge.module.weight), grad(maker.module.weight)])
        judge.requires_grad_(False)
        judge(maker(x(rank))).sum().backward()
        torch.optim.SGD(maker.parameters(), lr=0.0).step()
        seen.append([grad(maker.module.weight), grad(judge.module.weight)])
        maker.zero_grad()
    return seen


@case(0)
def nothing_is_left_in_torchs_optimizers(wrap, rank):
    gc.collect()  # what other programs left
    before = len(optimizer_hooks)
    model = wrap(Two(chained))
    backward(model, rank)
    del model
    gc.collect()
    return len(optimizer_hooks) - before


@case([[1.5, 1.5]] * 2, variants=NOT_STATIC)
def a_validation_in_another_thread_during_backward(wrap, rank):
    def validate():
        with torch.no_grad():
            model(x(rank))

    def in_a_thread(_grad):
        thread = threading.Thread(target=validate)
        thread.start()
        thread.join()

    def validated(two, x):
        between = two.a(x)
        if between.requires_grad:
            between.register_hook(in_a_thread)
        return two.b(between)

    model, seen = wrap(Two(validated)), []
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        seen.append(grads(model))
    return seen


def two_losses(wrap, rank, keep):
    """The gradient of a step with two backwards; ``keep(layer, loss)`` keeps the second loss."""

    def both(layer, x):
        layer.steps = getattr(layer, "steps", 0) + 1
        keep(layer, layer(10 * x).sum())
        return layer(x)

    wrapped = Wrapped(both)
    wrapped.layer.extra = None
    model, seen = wrap(wrapped), []
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        if wrapped.layer.extra is not None:
            sum(wrapped.layer.extra).backward()
        seen.append(grad(wrapped.layer.weight))
    return seen


@case([16.5] * 3, torch=[by_rank(11.5, 21.5)] * 3, variants=("plain", "small", "unused"))
def an_auxiliary_loss_in_a_list(wrap, rank):
    return two_losses(wrap, rank, lambda layer, loss: setattr(layer, "extra", [loss]))


@case([1.5, 16.5, 16.5], torch=[1.5, *[by_rank(11.5, 21.5)] * 2], variants=("plain", "small"))
def an_auxiliary_loss_from_the_second_step_on(wrap, rank):
    def keep(layer, loss):
        if layer.steps > 1:
            layer.extra = loss[None]

    return two_losses(wrap, rank, keep)


@case([True, 0])
def a_module_that_refers_to_its_wrapper_can_go(wrap, rank):
    gc.collect()
    before, layer = len(optimizer_hooks), line()
    layer.trainer = [wrap(layer)]
    backward(layer.trainer[0], rank)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    return [gone() is None, len(optimizer_hooks) - before]


@case(1.5, variants=("plain", "view"))
def wrapped_anew_after_a_backward_that_was_broken_off(wrap, rank):
    fragile = Fragile()
    attempt(lambda model: model(x(rank), breaks=True).sum().backward(), wrap(fragile))
    fragile.zero_grad()
    model = wrap(fragile)
    backward(model, rank)
    sgd(model).step()
    return grad(fragile.a.weight)
