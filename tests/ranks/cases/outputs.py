"""What a forward pass may return, and the tools that come in between."""

from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from models import line
from torch import Tensor, nn
from torch.func import functional_call

from cases import EVERY, Two, Wrapped, attempt, backward, by_rank, case, error, grad, grads, sgd, x

Pair = namedtuple("Pair", "value label")
NOT_STATIC = EVERY[:4]
READY_TWICE = error(RuntimeError, "Expected to mark a variable ready only once")


@dataclass
class Result:
    value: Tensor
    label: str = ""


class Opaque:
    """An object that no wrapper knows how to look into."""

    def __init__(self, value):
        self._hidden = [value]


def two_steps(wrap, rank, pack, unpack):
    """The gradient after each of two steps with an output packed and unpacked."""
    model, seen = wrap(Wrapped(lambda layer, x: pack(layer(x)))), []
    for _ in range(2):
        model.zero_grad()
        unpack(model(x(rank))).sum().backward()
        seen.append(grad(model.module.layer.weight))
    return seen


@case([1.5, 1.5], variants=EVERY)
def a_dict(wrap, rank):
    return two_steps(wrap, rank, lambda y: {"y": y, "n": 3}, lambda out: out["y"])


@case([1.5, 1.5])
def an_ordered_dict(wrap, rank):
    return two_steps(wrap, rank, lambda y: OrderedDict(y=y), lambda out: out["y"])


@case([1.5, 1.5], torch={"static": [by_rank(1.0, 2.0)] * 2}, variants=EVERY)
def a_dataclass(wrap, rank):
    return two_steps(wrap, rank, Result, lambda out: out.value)


@dataclass
class Unfinished:
    value: Tensor
    later: Tensor = field(init=False)


@case([1.5, 1.5])
def a_dataclass_with_a_field_not_set(wrap, rank):
    return two_steps(wrap, rank, Unfinished, lambda out: out.value)


def ring(y):
    output = {"y": y, "kind": Result}
    output["self"] = output
    return output


@case([1.5, 1.5])
def a_dict_that_holds_itself(wrap, rank):
    return two_steps(wrap, rank, ring, lambda out: out["y"])


@case([1.5, 1.5], variants=EVERY)
def a_named_tuple(wrap, rank):
    return two_steps(wrap, rank, lambda y: Pair(y, "label"), lambda out: out.value)


@case([1.5, 1.5])
def nested_lists_and_tuples(wrap, rank):
    return two_steps(wrap, rank, lambda y: [({"y": (y,)}, None), 2], lambda out: out[0][0]["y"][0])


@case([1.5, 1.5], torch={"unused": READY_TWICE}, variants=NOT_STATIC)
def an_object_of_a_class_of_its_own(wrap, rank):
    return two_steps(wrap, rank, Opaque, lambda out: out._hidden[0])


@case([1.5, 1.5])
def a_function(wrap, rank):
    return two_steps(wrap, rank, lambda y: lambda: y, lambda out: out())


@case([1.5, 1.5])
def a_view_of_the_output_changed_in_place(wrap, rank):
    return two_steps(wrap, rank, lambda y: y * 1, lambda out: out.view(-1).mul_(1.0))


@case([16.5, 16.5], torch=[by_rank(11.5, 21.5)] * 2)
def two_opaque_outputs_two_backwards(wrap, rank):
    model, seen = wrap(Wrapped(lambda layer, x: Opaque(layer(x)))), []
    for _ in range(2):
        model.zero_grad()
        first, second = model(x(rank)), model(x(rank, 10))
        first._hidden[0].sum().backward()
        second._hidden[0].sum().backward()
        seen.append(grad(model.module.layer.weight))
    return seen


@case([1.5, by_rank(1.0, 2.0), 3.0])
def an_opaque_output_in_no_sync(wrap, rank):
    model, seen = wrap(Wrapped(lambda layer, x: Opaque(layer(x)))), []
    for synchronise in (True, False, True):
        with nullcontext() if synchronise else model.no_sync():
            model(x(rank))._hidden[0].sum().backward()
        seen.append(grad(model.module.layer.weight))
        if len(seen) == 1:
            model.zero_grad()
    return seen


@case(
    [error(RuntimeError, "in the middle of backward"), 1.0], torch=["stepped", by_rank(0.0, -1.0)]
)
def an_optimizer_that_steps_in_a_backward_from_an_opaque_output(wrap, rank):
    model = wrap(Wrapped(lambda layer, x: Opaque(layer(x))))
    weight, optimizer = model.module.layer.weight, sgd(model)
    weight.register_post_accumulate_grad_hook(lambda _param: optimizer.step() and None)
    outcome = attempt(lambda: model(x(rank))._hidden[0].sum().backward())
    return [outcome or "stepped", weight.item()]


@case([1.5, 1.5], variants=("plain", "unused"))
def two_outputs_in_two_backwards(wrap, rank):
    """Both through one graph of which the first backward keeps what the second needs."""
    model = wrap(Two(lambda two, x: (two.a(x), two.b(x))))
    first, second = model(x(rank))
    (first.sum() + 0 * second.sum()).backward(retain_graph=True)
    model.module.b.weight.grad = None
    model2 = wrap(Two(lambda two, x: (two.a(x), two.b(x))))
    outputs = model2(x(rank))
    torch.autograd.backward([o.sum() for o in outputs])
    return grads(model2)


@case([1.5, 3.0])
def functional_call_with_its_own_parameters(wrap, rank):
    model, seen = wrap(line()), []
    for _ in range(2):
        functional_call(model, dict(model.named_parameters()), x(rank)).sum().backward()
        seen.append(grad(model.module.weight))
    return seen


@case([1.5, 1.5], variants=EVERY)
def autocast(wrap, rank):
    model, seen = wrap(Two(lambda two, x: two.b(two.a(x)))), []
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x(rank)).sum()
        loss.backward()
        seen.append(grad(model.module.a.weight))
    return seen


@case([3.0, "torch.float32"])
def autocast_and_no_sync(wrap, rank):
    model = wrap(line())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with model.no_sync():
            backward(model, rank)
        backward(model, rank)
    weight = model.module.weight
    return [grad(weight), str(weight.grad.dtype)]


@case([1.5, 1.5], variants=("plain", "view", "unused", "static"))
def compiled_inside(wrap, rank):
    inner = line()
    model, seen = wrap(Wrapped(lambda layer, x: compiled(x))), []
    compiled = torch.compile(model.module.layer, backend="eager")
    del inner
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        seen.append(grad(model.module.layer.weight))
    return seen


@case([1.5, 3.0])
def compiled_outside(wrap, rank):
    model, seen = torch.compile(wrap(line()), backend="eager"), []
    for _ in range(2):
        backward(model, rank)
        seen.append(grad(model.module.weight))
    return seen


@case([by_rank(1.0, 2.0), 3.0])
def compiled_outside_with_no_sync(wrap, rank):
    wrapper = wrap(line())
    model = torch.compile(wrapper, backend="eager")
    with wrapper.no_sync():
        backward(model, rank)
    local = grad(wrapper.module.weight)
    backward(model, rank)
    return [local, grad(wrapper.module.weight)]


@case([1.5, 1.5])
def forward_hooks_of_the_user(wrap, rank):
    model, seen = wrap(line()), []
    model.register_forward_hook(lambda module, args, output: seen.append("after") or output * 1)
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    backward(model, rank)
    assert seen == ["before", "after"]
    return [grad(model.module.weight)] * 2


@case(1.5)
def backward_hooks_of_the_user(wrap, rank):
    model, seen = wrap(nn.Sequential(line())), []
    model.register_full_backward_hook(lambda *_: seen.append("whole"))
    model.module[0].register_full_backward_hook(lambda *_: seen.append("layer"))
    model(x(rank).requires_grad_()).sum().backward()
    assert seen == ["layer", "whole"]
    return grad(model.module[0].weight)
