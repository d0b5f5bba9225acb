"""The models and the recorder that other tests stand on are what they claim to be."""

import pytest
import torch
import torch.distributed as dist
from models import (
    MODELS,
    ChannelsLast,
    Fragile,
    Frozen,
    MixedDtypes,
    OddShapes,
    Tied,
    WithBuffers,
    batch,
    chain,
    loss_of,
)
from recorder import kinds, record


@pytest.mark.parametrize("name", MODELS)
def test_every_learning_parameter_gets_a_gradient_and_no_other(name):
    model = MODELS[name]()
    loss_of(model(batch(0, 0))).backward()
    for param in model.parameters():
        assert (param.grad is not None) == param.requires_grad
        if param.requires_grad and param.numel():
            assert param.grad.abs().max() > 0


def test_data_differs_by_rank_and_iteration_and_is_always_the_same():
    assert torch.equal(batch(1, 2), batch(1, 2))
    assert not torch.equal(batch(0, 2), batch(1, 2))
    assert not torch.equal(batch(1, 0), batch(1, 2))


def test_tied_is_tied():
    model = Tied()
    assert model.last.weight is model.first.weight
    assert len([*model.parameters()]) == 5 and len(model.state_dict()) == 6


def test_frozen_is_frozen_in_part():
    model = Frozen()
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert model.temperature.dtype is torch.float64


def test_dtypes_are_mixed_and_each_gradient_keeps_its_own():
    model = MixedDtypes()
    loss_of(model(batch(0, 0))).backward()
    dtypes = [p.grad.dtype for p in model.parameters()]
    assert dtypes[::2] == dtypes[1::2]
    assert dtypes[::2] == [
        torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float32
    ]  # fmt: skip


def test_channels_last_is_not_contiguous():
    model = ChannelsLast()
    assert model.second.weight.stride(1) == 1 and not model.second.weight.is_contiguous()
    assert model.turned.stride() == (1, 12)


def test_odd_shapes_are_odd():
    shapes = [tuple(p.shape) for p in OddShapes().parameters()]
    assert {(), (1, 1), (0,)} < set(shapes)


def test_buffers_come_in_several_kinds():
    model = WithBuffers()
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.bool, torch.int64}
    assert model.every_second.stride() == (2,) and model.nothing is None


def test_fragile_breaks_after_c_or_leaves_b_out():
    model = Fragile()
    with pytest.raises(ValueError, match="boom"):
        model(torch.ones(1, 1), breaks=True).sum().backward()
    assert [p.grad is None for p in (model.a.weight, model.b.weight, model.c.weight)] == [
        True, True, False
    ]  # fmt: skip
    model.zero_grad()
    model(torch.ones(1, 1), skip_b=True).sum().backward()
    assert model.b.weight.grad is None and model.a.weight.grad is not None


def test_recorder_sees_gradients_in_order_and_leaves_no_trace():
    model, all_reduce = chain("a", "b"), dist.all_reduce
    with record(model) as events:
        model(torch.ones(1, 1)).sum().backward()
        assert dist.all_reduce is not all_reduce
    assert [(e.kind, e.name) for e in events] == [
        ("gradient", "b.weight"),
        ("gradient", "a.weight"),
    ]
    model(torch.ones(1, 1)).sum().backward()
    assert kinds(events) == ["gradient", "gradient"] and dist.all_reduce is all_reduce
