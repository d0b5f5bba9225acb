"""Dtypes, shapes and memory layouts of parameters, and sparse gradients."""

import torch
from models import ChannelsLast, loss_of
from torch import nn

from cases import EVERY, HANGS, attempt, backward, case, error, grad, numbers

NOT_UNUSED = ("plain", "view", "small", "static")


class Parameters(nn.Module):
    """The sum of all parameters, each times the input."""

    def __init__(self, *tensors):
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def forward(self, x):
        return sum((p.abs() if p.is_complex() else p).double().sum() * x for p in self.p)


def two_steps(model, rank):
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    return [(str(p.grad.dtype), numbers(p.grad)) for p in model.parameters() if p.requires_grad]


@case([("torch.float32", 1.5)] * 2, variants=EVERY)
def a_frozen_parameter_with_a_dtype_of_its_own(wrap, rank):
    model = Parameters(torch.ones(1), torch.ones(3, dtype=torch.float16), torch.ones(1))
    model.p[1].requires_grad_(False)
    return two_steps(wrap(model), rank)


@case([("torch.float32", []), ("torch.float32", 1.5), ("torch.float32", 1.5)], variants=EVERY)
def shapes_with_few_numbers(wrap, rank):
    return two_steps(wrap(Parameters(torch.ones(0), torch.ones(()), torch.ones(1, 1))), rank)


INTERLEAVED = [torch.float32, torch.float64, torch.bfloat16, torch.float32]


@case([(str(dtype), [1.5, 1.5]) for dtype in INTERLEAVED], variants=EVERY)
def dtypes_interleaved(wrap, rank):
    return two_steps(wrap(Parameters(*(torch.ones(2, dtype=d) for d in INTERLEAVED))), rank)


@case([1.0 + 1e-12 / 2, 1 + 2**-8])
def precision_of_each_dtype_is_kept(wrap, rank):
    model = wrap(Parameters(torch.ones(1, dtype=torch.float64), torch.ones(1)))
    double, single = model.module.p
    (
        model(torch.ones(1)) * 0 + double * (1 + rank * 1e-12) + single * (1 + rank * 2**-7)
    ).backward()
    return [grad(double), grad(single)]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.ones(1, dtype=torch.complex64))
        self.r = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.c * (1 + 1j) * x).real + self.r * x


@case([1.5 - 1.5j, 1.5], variants=EVERY)
def complex_and_real(wrap, rank):
    model = wrap(Complex())
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    return [grad(model.module.c), grad(model.module.r)]


class Conjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.ones(1, 1, dtype=torch.complex64))

    def forward(self, x):
        return ((1 + 1j) * x @ self.c.mH).real


@case([1.5 + 1.5j] * 2, variants=EVERY)
def a_gradient_that_is_a_conjugate_view(wrap, rank):
    model, seen = wrap(Conjugate()), []
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        seen.append(grad(model.module.c))
    return seen


def gradients_like_one_process(wrap, module, rank):
    """Whether the wrapper's gradients equal those of the whole batch, strides as well."""
    shards = [torch.randn(4, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    model = wrap(module)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(shards[rank])).backward()
    got = [p.grad.clone(memory_format=torch.preserve_format) for p in module.parameters()]
    module.zero_grad()
    loss_of(module(torch.cat(shards))).backward()
    wanted = [p.grad for p in module.parameters()]
    return all(torch.allclose(g, w, atol=1e-6) for g, w in zip(got, wanted, strict=True))


@case(True, variants=EVERY)
def channels_last_and_transposed(wrap, rank):
    return gradients_like_one_process(wrap, ChannelsLast(), rank)


class Matrix(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


@case(True, variants=("plain", "view"))
def a_parameter_with_gaps(wrap, rank):
    return gradients_like_one_process(wrap, Matrix(torch.randn(4, 6)[:, ::2]), rank)


@case(True, variants=("plain", "view"))
def an_expanded_parameter(wrap, rank):
    module = Matrix(torch.randn(4, 3))
    module.weight = nn.Parameter(
        torch.randn(1, 4, 3).permute(2, 1, 0).contiguous().permute(2, 1, 0)[0]
    )
    return gradients_like_one_process(wrap, module, rank)


@case(error(RuntimeError, "weight", "strides", "rank 1"), torch=HANGS, alone=True)
def layouts_that_differ_between_ranks(wrap, rank):
    weight = torch.ones(2, 2)
    model = wrap(Matrix(weight.t() if rank == 1 else weight))
    model(torch.eye(2)).sum().backward()
    return grad(model.module.weight)


class Looked(nn.Module):
    """A sparse embedding, and behind it one weight of value 1."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)

    def forward(self, indices):
        return self.layer(self.table(indices))


def look_up(model, rank, steps=2):
    seen = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.tensor([rank, 3])).sum().backward()
        seen.append(model.module.table.weight.grad.to_dense().flatten().tolist())
    return seen


@case([[0.5, 0.5, 0.0, 1.0]] * 3, variants=NOT_UNUSED)
def sparse_embedding(wrap, rank):
    return look_up(wrap(Looked()), rank, steps=3)


@case([[0.5, 0.5, 0.0, 1.0]] * 3)
def sparse_embedding_with_detection(wrap, rank):
    return look_up(wrap(Looked(), find_unused_parameters=True), rank, steps=3)


@case([1.0, 1.0, 0.0, 2.0])
def sparse_embedding_accumulates(wrap, rank):
    model = wrap(Looked())
    with model.no_sync():
        look_up(model, rank, steps=1)
    model(torch.tensor([rank, 3])).sum().backward()
    return model.module.table.weight.grad.to_dense().flatten().tolist()


@case([0.5, 0.0, 0.0, 0.5])
def sparse_embedding_used_on_one_rank(wrap, rank):
    model = wrap(Looked(), find_unused_parameters=True)
    output = model(torch.tensor([0, 3]))
    loss = output.sum() if rank == 0 else model.module.layer(torch.ones(1)).sum() + 0 * output.sum()
    loss.backward()
    return model.module.table.weight.grad.to_dense().flatten().tolist()


@case(
    error(RuntimeError, "table.weight", "sparse"),
    torch=error(RuntimeError, "Expected variable to have sparse gradient"),
)
def a_sparse_layer_with_a_dense_gradient(wrap, rank):
    model = wrap(Looked())
    model.module.table.sparse = False
    return attempt(look_up, model, rank)


class Functional(Looked):
    """Looks up without a layer that could tell that gradients are sparse."""

    def forward(self, indices):
        return self.layer(nn.functional.embedding(indices, self.table.weight, sparse=True))


@case(
    error(RuntimeError, "table.weight", "sparse"),
    torch=error(NotImplementedError, "SparseTensorImpl"),
    variants=("plain", "view"),
)
def a_sparse_gradient_of_no_sparse_layer(wrap, rank):
    module = Functional()
    module.table.sparse = False
    return attempt(look_up, wrap(module), rank)
