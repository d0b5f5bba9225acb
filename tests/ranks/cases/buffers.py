"""Buffers: every rank sees rank 0's before a forward pass."""

import torch
from models import line
from torch import nn

from cases import EVERY, Wrapped, backward, by_rank, case, error, grad, x


class Scaled(nn.Module):
    """w * x * buf, with buf = rank + 1 before it is synchronised."""

    def __init__(self, rank):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("buf", torch.tensor([rank + 1.0]))

    def forward(self, x):
        return self.w * x * self.buf


@case([3.0, 1.0], variants=EVERY)
def two_forwards_in_one_loss(wrap, rank):
    model = wrap(Scaled(rank))
    (model(x(rank)) + model(x(rank))).sum().backward()
    return [grad(model.module.w), model.module.buf.item()]


class Reassigned(nn.Module):
    """Puts a new tensor in the buffer's place in every forward pass, and tells what it saw."""

    def __init__(self, rank):
        super().__init__()
        self.layer, self.rank, self.seen = line(), rank, []
        self.register_buffer("buf", torch.zeros(1))

    def forward(self, x):
        self.seen.append(self.buf.item())
        self.buf = torch.tensor([10.0 * (self.rank + 1)])
        return self.layer(x)


def seen_in_two_steps(model, rank):
    backward(model, rank)
    backward(model, rank)
    return model.module.seen


@case([0.0, 10.0])
def reassigned_in_forward(wrap, rank):
    return seen_in_two_steps(wrap(Reassigned(rank)), rank)


@case([0.0, by_rank(10.0, 20.0)])
def not_synchronised_when_not_asked_for(wrap, rank):
    return seen_in_two_steps(wrap(Reassigned(rank), forward_sync_buffers=False), rank)


@case([0.0, by_rank(10.0, 20.0), 10.0])
def not_synchronised_in_no_sync(wrap, rank):
    model = wrap(Reassigned(rank))
    with model.no_sync():
        backward(model, rank)
        backward(model, rank)
    backward(model, rank)
    backward(model, rank)
    return [*model.module.seen[:2], model.module.seen[3]]


@case([1.0, 1.0])
def synchronised_at_construction(wrap, rank):
    model = wrap(Scaled(rank), forward_sync_buffers=False)
    return [model.module.buf.item(), model.module.w.item()]


@case(by_rank(1.0, 2.0))
def not_at_construction_with_the_older_name(wrap, rank):
    return wrap(Scaled(rank), broadcast_buffers=False).module.buf.item()


@case([True, 0, "torch.int64"], variants=("plain", "view"))
def batch_norm(wrap, rank):
    torch.manual_seed(rank)
    model = wrap(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)))
    for _ in range(3):
        model(torch.randn(5, 1)).sum().backward()
    with torch.no_grad():
        model(torch.randn(5, 1))  # synchronises first, and then counts one more
    norm = model.module[1]
    mine = norm.running_mean.clone()
    return [
        bool(mine.isfinite().all()),
        norm.num_batches_tracked.item() - 4,
        str(norm.num_batches_tracked.dtype),
    ]


@case([3.0, 3.0])
def buffers_of_several_dtypes(wrap, rank):
    module = nn.Module()
    module.layer = line()
    for number, dtype in enumerate((torch.bool, torch.int64, torch.float16, torch.complex64)):
        module.register_buffer(f"b{number}", torch.ones(3, dtype=dtype) * (rank == 0))
    module.forward = lambda x: module.layer(x) * module.b1.sum()
    model = wrap(module)
    with torch.no_grad():
        output = model(torch.ones(1, 1)).item()
    return [output, sum(b.sum().item().real for b in module.buffers()) / 4]


@case([1.0, by_rank(1.0, 2.0)])
def ignored_names_are_left_alone(wrap, rank):
    class Both(Scaled):
        def __init__(self, rank):
            super().__init__(rank)
            self.register_buffer("own", torch.tensor([rank + 1.0]))

    module = Both(rank)
    module._ddp_params_and_buffers_to_ignore = ["own"]
    model = wrap(module)
    backward(model, rank)
    return [module.buf.item(), module.own.item()]


@case([[2.5, by_rank(1.0, 2.0)], [1.5, 1.0], [1.5, 1.0]], variants=EVERY)
def a_validation_under_inference_mode_before_training(wrap, rank):
    model, seen = wrap(Scaled(rank)), []
    with torch.inference_mode():
        model(x(rank))
    for _ in range(3):
        model.module.buf.fill_(rank + 1.0)
        model.zero_grad()
        backward(model, rank)
        seen.append([grad(model.module.w), model.module.buf.item()])
    return seen


@case([1.0, 1.0, 1.0], torch=[by_rank(1.0, 2.0)] * 3)
def registered_after_wrapping(wrap, rank):
    model, seen = wrap(Wrapped(lambda layer, x: layer(x) * layer.scale)), []
    model.module.layer.register_buffer("scale", torch.tensor(rank + 1.0))
    backward(model, rank)
    seen.append(model.module.layer.scale.item())
    model.module.layer.register_buffer("later", torch.tensor(rank + 1.0))
    backward(model, rank)
    return [*seen, model.module.layer.later.item(), model.module.layer.scale.item()]


@case([1.0, 1.0])
def of_a_submodule_put_in_after_wrapping(wrap, rank):
    model = wrap(nn.Sequential(line(), nn.BatchNorm1d(1, affine=False)))
    seen = []
    for _ in range(2):
        model.module[1] = nn.BatchNorm1d(1, affine=False)
        model.module[1].running_mean.fill_(rank + 1.0)
        model.eval()
        backward(model, rank)
        seen.append(model.module[1].running_mean.item())
    return seen


def cant_be_copied(wrap, rank, buffer):
    module = line()
    module.register_buffer("table", buffer)
    wrap(module)


@case(error(RuntimeError, "table can't be copied", "expanded"), torch=error(RuntimeError, "clone"))
def an_expanded_buffer(wrap, rank):
    cant_be_copied(wrap, rank, torch.zeros(1).expand(3))


@case(error(RuntimeError, "table can't be copied", "sparse"), torch=error(RuntimeError, "sparse"))
def a_sparse_buffer(wrap, rank):
    cant_be_copied(wrap, rank, torch.eye(3).to_sparse())


@case(
    error(RuntimeError, "table can't be copied", "quantized"),
    torch=error(NotImplementedError, "Quantized"),
)
def a_quantized_buffer(wrap, rank):
    cant_be_copied(wrap, rank, torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8))


@case(1.5)
def a_buffer_that_cannot_be_copied_but_is_ignored(wrap, rank):
    module = line()
    module.register_buffer("table", torch.zeros(1).expand(3))
    module._ddp_params_and_buffers_to_ignore = ["table"]
    model = wrap(module)
    backward(model, rank)
    return grad(module.weight)
