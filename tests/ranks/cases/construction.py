"""Construction, process groups and copies."""

import copy
import io
import pickle

import torch
import torch.distributed as dist
from models import line
from torch import nn

from cases import (
    HANGS,
    Error,
    Raised,
    Two,
    attempt,
    backward,
    by_rank,
    case,
    chained,
    error,
    grad,
    grads,
    only_a,
    x,
)


def same_on_all_ranks(outcome):
    """The outcome, if it is the same on every rank."""
    outcomes = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return outcome if len(set(map(str, outcomes))) == 1 else Raised("Different", str(outcomes))


def construct(wrap, module):
    return same_on_all_ranks(attempt(wrap, module))


class Ordered(nn.Module):
    """y = a * x + 10 * b * x, with a and b registered in the order given."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.ones(1)))

    def forward(self, x):
        return self.a * x + 10 * self.b * x


NUMBER = Error("Different", ("DDP expects same model across all ranks",))
DIFFERENT = "The ranks hold different models"


@case(
    error(RuntimeError, DIFFERENT, "rank 0 has 2", "rank 1 1"),
    torch=NUMBER,
)
def different_number_of_parameters(wrap, rank):
    return construct(wrap, nn.Linear(2, 3, bias=rank == 0))


@case(
    error(RuntimeError, DIFFERENT, "weight: shape [3, 2]", "weight: shape [3, 3]"),
    torch=HANGS,
    alone=True,
)
def different_shapes(wrap, rank):
    return construct(wrap, nn.Linear(2 + rank, 3))


@case(error(RuntimeError, DIFFERENT, "torch.float32", "torch.float64"), torch=HANGS, alone=True)
def different_dtypes(wrap, rank):
    module = nn.Linear(1, 1, bias=False, dtype=torch.float32 if rank == 0 else torch.float64)
    nn.init.ones_(module.weight)
    outcome = same_on_all_ranks(attempt(wrap, module))
    if isinstance(outcome, Raised):
        return outcome
    outcome(x(rank).to(module.weight.dtype)).sum().backward()
    return grad(module.weight)


@case(error(RuntimeError, DIFFERENT, "torch.float16", "torch.bfloat16"), torch="silent")
def different_dtypes_of_one_size(wrap, rank):
    module = nn.Linear(1, 1, bias=False, dtype=(torch.float16, torch.bfloat16)[rank])
    outcome = same_on_all_ranks(attempt(wrap, module))
    if isinstance(outcome, Raised):
        return outcome
    return "silent"


@case(error(RuntimeError, DIFFERENT, "(a:", "(b:"), torch=by_rank([10.5, 6.0], [6.0, 10.5]))
def different_order_of_registration(wrap, rank):
    model = wrap(Ordered("ab" if rank == 0 else "ba"))
    backward(model, rank)
    return [grad(model.module.a), grad(model.module.b)]


@case(error(RuntimeError, DIFFERENT, "a.weight", "not trained"), torch=NUMBER)
def frozen_on_one_rank(wrap, rank):
    module = Two(chained)
    module.a.weight.requires_grad_(rank == 0)
    return construct(wrap, module)


@case(
    error(RuntimeError, DIFFERENT, "1.weight: shape [1, 1]", "1.weight: shape [1, 2]"),
    torch="silent",
)
def different_shapes_of_a_frozen_layer(wrap, rank):
    frozen = nn.Linear(1 + rank, 1).requires_grad_(False)
    return construct(lambda module: wrap(module) and "silent", nn.Sequential(line(), frozen))


@case(error(RuntimeError, DIFFERENT, "(b: ", "(c: "), torch=by_rank([1.0, 2.0], [2.0, 1.0]))
def different_order_of_buffers(wrap, rank):
    module = line()
    for name in "bc" if rank == 0 else "cb":
        module.register_buffer(name, torch.tensor(1.0 if name == "b" else 2.0))
    wrap(module)
    return [module.b.item(), module.c.item()]


@case(error(RuntimeError, DIFFERENT, "torch.float32", "torch.float64"), torch=HANGS, alone=True)
def different_dtypes_of_a_buffer(wrap, rank):
    module = line()
    module.register_buffer("b", torch.ones(1, dtype=torch.float64 if rank else torch.float32))
    return construct(wrap, module)


@case(error(RuntimeError, DIFFERENT), torch=HANGS, alone=True, nprocs=3)
def one_of_three_ranks_differs(wrap, rank):
    return construct(wrap, nn.Linear(2, 3 if rank < 2 else 4))


@case(
    by_rank([10.0, 1.5], [10.0, 1.5], [12.0, 3.5], [12.0, 3.5]),
    nprocs=4,
    variants=("plain", "view", "small", "unused", "static"),
)
def two_groups_of_two(wrap, rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrap(line(10.0 + rank), process_group=groups[rank // 2])
    backward(model, rank)
    return [model.module.weight.item(), grad(model.module.weight)]


@case(by_rank(None, 2.5, 2.5), nprocs=3)
def a_group_that_leaves_one_rank_out(wrap, rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = wrap(line(), process_group=group)
    backward(model, rank)
    return grad(model.module.weight)


@case([1.5, 1.5])
def a_device_mesh(wrap, rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    model = wrap(Two(chained), device_mesh=mesh)
    backward(model, rank)
    return grads(model)


@case(error(NotImplementedError, "fully_shard"), torch=[])
def tensor_parallel_layers(wrap, rank):
    # here, because it takes seconds, and every rank of every test imports this file
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    layer = parallelize_module(line(), mesh["tensor"], ColwiseParallel())
    model = wrap(layer, device_mesh=mesh["data"])
    backward(model, rank)
    return grads(model)  # torch's class leaves the module without its parameters


@case([1.5, None, 1.5], variants=("plain", "view", "unused", "static"))
def a_deep_copy(wrap, rank):
    model = wrap(line())
    clone = copy.deepcopy(model)
    backward(clone, rank)
    of_clone, of_model = grad(clone.module.weight), grad(model.module.weight)
    backward(model, rank)
    return [of_clone, of_model, grad(model.module.weight)]


@case([1.5, 1.5])
def a_deep_copy_in_the_middle_of_training(wrap, rank):
    model = wrap(Two(chained))
    backward(model, rank)
    backward(model, rank)
    clone = copy.deepcopy(model)
    clone.zero_grad()
    backward(clone, rank)
    return grads(clone)


@case([1.5, None], variants=("plain", "view", "static"))
def pickled_and_back(wrap, rank):
    model = wrap(line())
    clone = pickle.loads(pickle.dumps(model))
    backward(clone, rank)
    return [grad(clone.module.weight), grad(model.module.weight)]


@case([1.5, None])
def saved_and_loaded(wrap, rank):
    model, file = wrap(line()), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    clone = torch.load(file, weights_only=False)
    backward(clone, rank)
    return [grad(clone.module.weight), grad(model.module.weight)]


@case(error(RuntimeError, "default process group"))
def a_deep_copy_with_a_group_of_its_own(wrap, rank):
    model = wrap(line(), process_group=dist.new_group([0, 1]))
    clone = copy.deepcopy(model)
    backward(clone, rank)
    return grad(clone.module.weight)


class Asks(nn.Linear):
    @property
    def size(self):
        return self.no_such_thing

    def forward(self, x):
        return super().forward(x) * self.size


@case([True, True])
def an_attribute_error_keeps_its_own_message(wrap, rank):
    module = Asks(1, 1)
    model = wrap(module)
    return [
        attempt(model, x(rank)) == attempt(module, x(rank)),
        attempt(getattr, model.module, "size") == attempt(getattr, module, "size"),
    ]


@case(4.0)
def weights_that_differ_at_the_start(wrap, rank):
    return wrap(line(4.0 + rank)).module.weight.item()


@case(by_rank(4.0, 5.0))
def weights_that_differ_and_stay_so(wrap, rank):
    return wrap(line(4.0 + rank), init_sync=False).module.weight.item()


@case([by_rank(4.0, 5.0), 4.0, by_rank(1.0, 2.0)])
def ignored_parameters_are_left_alone(wrap, rank):
    two = Two(lambda two, x: two.a(x) / two.a.weight.item() + two.b(x))
    two.a.weight.data.fill_(4.0 + rank)
    two.b.weight.data.fill_(4.0 + rank)
    two._ddp_params_and_buffers_to_ignore = ["a.weight"]
    wrap(two)
    return [two.a.weight.item(), two.b.weight.item(), by_hand(two, rank)]


def by_hand(two, rank):
    two.way = only_a
    two(x(rank)).sum().backward()
    return grad(two.a.weight)


@case([3.0, 3.0])
def two_wrappers_in_one_loss(wrap, rank):
    first, second = wrap(line(2.0)), wrap(line(2.0))
    second(first(x(rank))).sum().backward()
    return [grad(first.module.weight), grad(second.module.weight)]


@case([1.5, 1.5])
def a_wrapper_inside_a_module(wrap, rank):
    outer = nn.Sequential(wrap(line()), wrap(line()))
    backward(outer, rank)
    return grads(outer)


@case([1.5, 1.5])
def wrapped_twice(wrap, rank):
    model = wrap(wrap(Two(chained)))
    backward(model, rank)
    return grads(model)


@case([[1.5, 1.5], 2], variants=("plain", "unused", "static"))
def a_scripted_module(wrap, rank):
    module, seen = torch.jit.script(nn.Sequential(line(), nn.BatchNorm1d(1, affine=False))), []
    model = wrap(module)
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.randn(4, 1)).sum() * 0 + model.module[0](x(rank)).sum()
        loss.backward()
        seen.append(grad(model.module[0].weight))
    return [seen, module[1].num_batches_tracked.item()]


@case(
    [error(RuntimeError, "weight was replaced")] * 2,
    torch=[error(RuntimeError, "not the expected DDP bucket view")] * 2,
)
def one_module_in_two_wrappers_with_views(wrap, rank):
    layer = line()
    first, second = (wrap(layer, gradient_as_bucket_view=True) for _ in range(2))
    inner = wrap(line(), gradient_as_bucket_view=True)
    both = attempt(lambda: (first(x(rank)) + second(10 * x(rank))).sum().backward())
    nested = wrap(nn.Sequential(inner), gradient_as_bucket_view=True)
    return [both, attempt(lambda: nested(x(rank)).sum().backward())]
