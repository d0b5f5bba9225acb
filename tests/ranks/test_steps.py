"""The ladder on 2 and 3 ranks: against one process and torch's class, counted, and used again."""

import inspect
import time

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Fragile, batch, line, loss_of
from recorder import kinds, record
from torch import nn

from ddp_teach.launch import LaunchError, launch
from ddp_teach.steps import (
    LADDER,
    AverageAfterBackward,
    Buckets,
    ForwardOnly,
    OverlappedHooks,
    SameStart,
)

ITERATIONS = 4
MARKS = {
    ForwardOnly: pytest.mark.forward,
    SameStart: pytest.mark.same_start,
    AverageAfterBackward: pytest.mark.average,
    OverlappedHooks: pytest.mark.overlap,
    Buckets: pytest.mark.buckets,
}
SMALL = {"bucket_cap_mb": 100 / 2**20}  # of 100 bytes: several in most models
SMALLEST = {"bucket_cap_mb": 1 / 2**20}  # of 1 byte: one for every parameter


def marked(*classes):
    return [pytest.param(c, marks=MARKS[c], id=c.__name__) for c in classes]


AVERAGING = marked(AverageAfterBackward, OverlappedHooks, Buckets)
SYNCHRONISING = marked(OverlappedHooks, Buckets)


def backward(wrapper, loss, **kwargs):
    """What a training loop does with each step of the ladder."""
    loss.backward(**kwargs)
    if type(wrapper) is AverageAfterBackward:
        wrapper.sync_gradients()


def optimizer_for(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def numbers(model):
    """Copies of parameters and buffers, by name."""
    return {name: value.clone() for name, value in model.state_dict().items()}


# Oracle: the same training with torch's class, and in one process on the whole batch.


def train(wrap, build):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    wrapper = wrap(build())
    at_start = numbers(wrapper.module)
    optimizer = optimizer_for(wrapper)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        backward(wrapper, loss_of(wrapper(batch(rank, iteration))))
        optimizer.step()
    return at_start, numbers(wrapper.module)


def train_all():
    return {
        (wrap.__name__, name): train(wrap, build)
        for name, build in MODELS.items()
        for wrap in (*LADDER, small_buckets, nn.parallel.DistributedDataParallel)
    }


def small_buckets(model):
    return Buckets(model, **SMALL)


def train_alone(world_size):
    """By model: the numbers at the end, with all data of ``world_size`` ranks in one batch."""
    ends = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model = build()
        optimizer = optimizer_for(model)
        for iteration in range(ITERATIONS):
            optimizer.zero_grad()
            whole_batch = torch.cat([batch(rank, iteration) for rank in range(world_size)])
            loss_of(model(whole_batch)).backward()
            optimizer.step()
        ends[name] = numbers(model)
    return ends


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def trained(request):
    """For every rank: (step, model) -> numbers at the start and at the end."""
    return launch(train_all, nprocs=request.param)


@pytest.fixture(scope="module")
def alone(trained):
    return launch(train_alone, len(trained), nprocs=1)[0]


def assert_close(got, expected):
    """Equal within rounding; the bfloat16 weights are smaller than 1, so to the last place of 1."""
    assert got.keys() == expected.keys()
    for key, value in got.items():
        bfloat16 = {"rtol": 0, "atol": torch.finfo(torch.bfloat16).eps}
        tolerance = bfloat16 if value.dtype is torch.bfloat16 else {}
        torch.testing.assert_close(
            value, expected[key], msg=lambda m, k=key: f"{k}: {m}", **tolerance
        )


def assert_equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


WRAPS = [*AVERAGING, pytest.param(small_buckets, marks=pytest.mark.buckets, id="small buckets")]
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@EVERY_MODEL
@pytest.mark.parametrize("wrap", WRAPS)
def test_trains_as_one_process_on_the_whole_batch(trained, alone, wrap, name):
    for results in trained:
        start, end = results[wrap.__name__, name]
        assert_close(end, alone[name])
        assert any(not torch.equal(start[key], end[key]) for key in end), "nothing was learned"
        assert all(value.isfinite().all() for value in end.values())


@EVERY_MODEL
@pytest.mark.parametrize("wrap", WRAPS)
def test_trains_as_torchs_class(trained, wrap, name):
    for results in trained:
        _, end = results[wrap.__name__, name]
        _, expected = results["DistributedDataParallel", name]
        # adding two numbers has one order, and so has a model of one parameter
        if len(trained) == 2 or name == "one_matrix":
            assert_equal(end, expected)
        else:
            assert_close(end, expected)


@EVERY_MODEL
@pytest.mark.parametrize("wrap", WRAPS)
def test_all_ranks_end_with_the_same_model(trained, wrap, name):
    ends = [results[wrap.__name__, name][1] for results in trained]
    for end in ends[1:]:
        assert_equal(end, ends[0])


@EVERY_MODEL
@pytest.mark.parametrize("wrap", marked(*LADDER[1:]))
def test_all_ranks_start_with_the_model_of_rank_0(trained, wrap, name):
    torch.manual_seed(0)
    expected = numbers(MODELS[name]())
    for results in trained:
        assert_equal(results[wrap.__name__, name][0], expected)


@EVERY_MODEL
@pytest.mark.forward
def test_forward_only_leaves_each_rank_its_own_model(trained, name):
    for rank, results in enumerate(trained):
        torch.manual_seed(rank)
        assert_equal(results["ForwardOnly", name][0], numbers(MODELS[name]()))


@EVERY_MODEL
@pytest.mark.same_start
def test_with_the_same_start_alone_the_ranks_drift_apart(trained, name):
    ends = [results["SameStart", name][1] for results in trained]
    assert any(not torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


# Forward.


class Echo(nn.Module):
    def forward(self, *inputs, **kwargs):
        return inputs, kwargs


@pytest.mark.forward
def test_forward_passes_everything_on_and_back_unchanged():
    inputs, pair = torch.ones(2), (torch.ones(1), torch.zeros(1))
    (first, second), kwargs = ForwardOnly(Echo())(inputs, pair, scale=2.0)
    assert first is inputs and second is pair and kwargs == {"scale": 2.0}
    assert ForwardOnly(nn.Identity())(None) is None


@pytest.mark.forward
@pytest.mark.parametrize("step", marked(*LADDER[1:]))
def test_without_a_process_group_torch_says_so(step):
    with pytest.raises(ValueError, match="process group has not been initialized"):
        step(line())


# Count: how many collectives, in what order, how many bytes, and when.


def count_everything():
    """By step: the events of construction, and those of two backward passes of an mlp."""
    rank, events_of = dist.get_rank(), {}
    for wrap in (*LADDER, small_buckets):
        model = MODELS["mlp"]()
        with record(model) as events:
            wrapper = wrap(model)
            construction = events.copy()
            passes = []
            for iteration in range(2):
                events.clear()
                backward(wrapper, loss_of(wrapper(batch(rank, iteration))))
                passes.append(events.copy())
        events_of[wrap.__name__] = construction, passes
    return events_of


@pytest.fixture(scope="module")
def counted():
    return launch(count_everything)


MLP_SIZES = {name: p.numel() * 4 for name, p in MODELS["mlp"]().named_parameters()}


def test_construction_broadcasts_each_tensor_once(counted):
    for events_of in counted:
        assert events_of["ForwardOnly"][0] == []
        for step in LADDER[1:]:
            construction, _ = events_of[step.__name__]
            assert kinds(construction) == ["broadcast"] * len(MLP_SIZES)
            assert [e.nbytes for e in construction] == list(MLP_SIZES.values())


@pytest.mark.forward
@pytest.mark.same_start
def test_before_step_3_backward_sends_nothing(counted):
    for events_of in counted:
        for step in (ForwardOnly, SameStart):
            for events in events_of[step.__name__][1]:
                assert kinds(events) == ["gradient"] * len(MLP_SIZES)


@pytest.mark.average
def test_average_sends_one_all_reduce_per_parameter_after_backward(counted):
    n = len(MLP_SIZES)
    for events_of in counted:
        for events in events_of["AverageAfterBackward"][1]:
            assert kinds(events) == ["gradient"] * n + ["all_reduce"] * n
            assert [e.nbytes for e in events[n:]] == list(MLP_SIZES.values())


@pytest.mark.overlap
def test_overlap_starts_each_all_reduce_as_soon_as_its_gradient_is_ready(counted):
    n = len(MLP_SIZES)
    for events_of in counted:
        for events in events_of["OverlappedHooks"][1]:
            assert kinds(events) == ["gradient", "all_reduce"] * n + ["wait"] * n
            for gradient, all_reduce in zip(
                events[: 2 * n : 2], events[1 : 2 * n : 2], strict=True
            ):
                assert all_reduce.async_op and all_reduce.nbytes == MLP_SIZES[gradient.name]


@pytest.mark.buckets
def test_buckets_send_few_all_reduces_and_the_same_bytes(counted):
    for events_of in counted:
        for events in events_of["Buckets"][1]:  # all fits into one bucket
            assert kinds(events)[-2:] == ["all_reduce", "wait"]
            assert [e.nbytes for e in events if e.kind == "all_reduce"] == [sum(MLP_SIZES.values())]
        for events in events_of["small_buckets"][1]:
            sent = [e.nbytes for e in events if e.kind == "all_reduce"]
            weights_and_biases = [MLP_SIZES[f"{i}.weight"] + MLP_SIZES[f"{i}.bias"] for i in (4, 2)]
            assert sent == [*weights_and_biases, MLP_SIZES["0.weight"] + MLP_SIZES["0.bias"]]
            first_sent, last_gradient = kinds(events).index("all_reduce"), events[::-1]
            assert "gradient" in kinds(events[first_sent:]), "no overlap"
            assert kinds(last_gradient)[: len(sent)] == ["wait"] * len(sent)


@pytest.fixture(scope="module")
def collectives():
    """For every rank: (step, model) -> numbers of broadcasts, all-reduces and waits."""
    return launch(count_collectives)


def count_collectives():
    counts = {}
    for name in ("tied", "frozen", "dtypes"):
        for step in LADDER:
            with record() as events:
                wrapper = step(MODELS[name]())
                backward(wrapper, loss_of(wrapper(batch(dist.get_rank(), 0))))
            kinds_seen = kinds(events)
            counts[step.__name__, name] = [
                kinds_seen.count(kind) for kind in ("broadcast", "all_reduce", "wait")
            ]
    return counts


def expected_counts(name):
    model = MODELS[name]()
    tensors, params = len([*model.parameters(), *model.buffers()]), list(model.parameters())
    learning = [p for p in params if p.requires_grad]
    n, dtypes = len(learning), len({p.dtype for p in learning})
    return {
        "ForwardOnly": [0, 0, 0],
        "SameStart": [tensors, 0, 0],
        "AverageAfterBackward": [tensors, n, 0],
        "OverlappedHooks": [tensors, n, n],
        "Buckets": [tensors, dtypes, dtypes],
    }


def layout():
    return repr(Buckets(MODELS["mlp"](), **SMALL))


@pytest.mark.buckets
def test_repr_shows_the_buckets_in_launch_order():
    for text in launch(layout):
        lines = [line.strip() for line in text.splitlines() if "Bucket(" in line]
        assert lines == [
            "Bucket(27 x float32, 108 bytes: 4.bias, 4.weight)",
            "Bucket(72 x float32, 288 bytes: 2.bias, 2.weight)",
            "Bucket(40 x float32, 160 bytes: 0.bias, 0.weight)",
        ]


@pytest.mark.parametrize("name", ["tied", "frozen", "dtypes"])
@pytest.mark.parametrize("step", marked(*LADDER))
def test_tied_parameters_travel_once_frozen_ones_never_and_a_bucket_has_one_dtype(
    collectives, step, name
):
    for counts in collectives:
        assert counts[step.__name__, name] == expected_counts(name)[step.__name__]


# Order: gradients that get ready in another order on another rank.


def ranks_in_another_order(step):
    """a = 2 I, b = 3 I; rank 0 computes b(a(x)), rank 1 a(b(x)). One number of each gradient."""
    rank = dist.get_rank()
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    for layer, factor in zip(model.values(), (2.0, 3.0), strict=True):
        layer.weight.data = factor * torch.eye(4)
    wrapper = Buckets(model, **SMALLEST) if step is Buckets else step(model)
    first, second = (model["a"], model["b"]) if rank == 0 else (model["b"], model["a"])
    backward(wrapper, second(first(torch.full((1, 4), rank + 1.0))).sum())
    return [layer.weight.grad[0, 0].item() for layer in model.values()]


@pytest.mark.parametrize("step", marked(AverageAfterBackward, Buckets))
def test_sums_belong_together_whatever_order_the_gradients_come_in(step):
    assert launch(ranks_in_another_order, step) == [[4.5, 3.0]] * 2


@pytest.mark.overlap
def test_hooks_alone_sum_whatever_comes_first():
    """The flaw of step 4 that buckets cure, so that the course may show it."""
    # rank 0 sends b = 2 and then a = 3, rank 1 a = 6 and then b = 4
    assert launch(ranks_in_another_order, OverlappedHooks) == [[3.5, 4.0], [4.0, 3.5]]


# Second use: after an exception, before zero_grad, after an error, with a graph from before.


def gradients(wrapper):
    return [None if p.grad is None else p.grad.item() for p in wrapper.module.parameters()]


def use_again(step):
    """The gradients after several uses of one wrapper around a * b * c * x, all weights 1."""
    x = torch.tensor([[dist.get_rank() + 1.0]])
    wrapper = step(Fragile())
    got = {}
    for set_to_none in (True, False):
        if dist.get_rank() == 1:
            time.sleep(0.2)  # rank 0 zeroes its gradients while its all-reduce is still under way
        with pytest.raises(ValueError, match="boom"):
            wrapper(x, breaks=True).sum().backward()
        wrapper.zero_grad(set_to_none)
        backward(wrapper, wrapper(x).sum())
        got[f"after an exception, {set_to_none=}"] = gradients(wrapper)

    backward(wrapper, wrapper(x).sum())
    got["accumulated over two backward passes"] = gradients(wrapper)

    broken, whole = wrapper(x, breaks=True), wrapper(x)
    with pytest.raises(ValueError, match="boom"):
        broken.sum().backward()
    wrapper.zero_grad()
    backward(wrapper, whole.sum())
    got["after an exception, with a graph from before"] = gradients(wrapper)

    wrapper.zero_grad()
    backward(wrapper, (wrapper(x) + wrapper(x)).sum())
    got["two forward passes, one backward"] = gradients(wrapper)

    wrapper.zero_grad()
    loss = wrapper(x).sum()
    backward(wrapper, loss, retain_graph=True)
    backward(wrapper, loss)
    got["the same graph twice"] = gradients(wrapper)

    wrapper.zero_grad()
    backward(wrapper, wrapper(x).sum(), create_graph=True)
    got["create_graph"] = gradients(wrapper)
    return got


@pytest.mark.parametrize("step", AVERAGING)
@pytest.mark.parametrize("nprocs", [2, 3])
def test_is_right_when_used_again(step, nprocs):
    mean = (nprocs + 1) / 2
    for got in launch(use_again, step, nprocs=nprocs):
        assert got == {
            "after an exception, set_to_none=True": pytest.approx([mean] * 3),
            "after an exception, set_to_none=False": pytest.approx([mean] * 3),
            "accumulated over two backward passes": pytest.approx([2 * mean] * 3),
            "after an exception, with a graph from before": pytest.approx([mean] * 3),
            "two forward passes, one backward": pytest.approx([2 * mean] * 3),
            "the same graph twice": pytest.approx([2 * mean] * 3),
            "create_graph": pytest.approx([mean] * 3),
        }


def break_off(step):
    """The collectives of a backward that breaks off after c, and of the next."""
    x = torch.ones(1, 1)
    wrapper = step(Fragile(), **(SMALLEST if step is Buckets else {}))
    with record() as events:
        with pytest.raises(ValueError, match="boom"):
            wrapper(x, breaks=True).sum().backward()
        wrapper(x).sum().backward()
    return kinds(events)


@pytest.mark.parametrize("step", SYNCHRONISING)
def test_what_an_exception_left_under_way_is_waited_for_first(step):
    one, three = ["all_reduce"], ["all_reduce"] * 3 + ["wait"] * 3
    assert launch(break_off, step) == [[*one, "wait", *three]] * 2


def freeze_later():
    wrapper = AverageAfterBackward(Fragile())
    wrapper.module.b.requires_grad_(False)
    wrapper.module.b.weight.grad = torch.full((1, 1), 7.0 + dist.get_rank())
    backward(wrapper, wrapper(torch.tensor([[dist.get_rank() + 1.0]])).sum())
    return gradients(wrapper)


@pytest.mark.average
def test_average_leaves_an_old_gradient_of_a_frozen_parameter_alone():
    assert launch(freeze_later) == [[1.5, 7.0, 1.5], [1.5, 8.0, 1.5]]


def leave_b_out(step):
    """An unused parameter on all ranks, then a normal step; what was said, and the gradients."""
    x = torch.tensor([[dist.get_rank() + 1.0]])
    wrapper, said = step(Fragile()), None
    try:
        backward(wrapper, wrapper(x, skip_b=True).sum())
    except RuntimeError as error:
        said = str(error)
    without_b = gradients(wrapper)
    wrapper.zero_grad()
    backward(wrapper, wrapper(x).sum())
    return said, without_b, gradients(wrapper)


@pytest.mark.average
def test_average_leaves_a_gradient_that_is_none_alone():
    for said, without_b, afterwards in launch(leave_b_out, AverageAfterBackward):
        assert (said, without_b, afterwards) == (None, [1.5, None, 1.5], [1.5] * 3)


@pytest.mark.parametrize("step", SYNCHRONISING)
def test_an_unused_parameter_is_an_error_that_names_it_and_the_next_step_is_right(step):
    for rank, (said, _, afterwards) in enumerate(launch(leave_b_out, step)):
        assert f"Rank {rank} got no gradient for b.weight." in said
        assert afterwards == [1.5] * 3


def leave_b_out_on_rank_1(step):
    wrapper = step(Fragile())
    wrapper(torch.ones(1, 1), skip_b=dist.get_rank() == 1).sum().backward()


@pytest.mark.parametrize("step", SYNCHRONISING)
def test_a_parameter_unused_on_one_rank_ends_the_launch_with_its_name(step):
    with pytest.raises(LaunchError, match="Rank 1 got no gradient for b.weight"):
        launch(leave_b_out_on_rank_1, step)


# Groups.


def in_a_group(step):
    """Ranks 1 and 2 train together, rank 0 alone; weights start at 10 + rank."""
    rank = dist.get_rank()
    group = [dist.new_group(ranks) for ranks in ([0], [1, 2])][min(rank, 1)]
    wrapper = step(line(10.0 + rank), process_group=group)
    backward(wrapper, wrapper(torch.tensor([[rank + 1.0]])).sum())
    return wrapper.module.weight.item(), *gradients(wrapper)


@pytest.mark.parametrize("step", AVERAGING)
def test_trains_within_its_process_group(step):
    assert launch(in_a_group, step, nprocs=3) == [(10.0, 1.0), (11.0, 2.5), (11.0, 2.5)]


# The code itself is what the course shows.


@pytest.mark.parametrize("step", marked(*LADDER))
def test_a_step_fits_on_a_screen_and_says_what_it_adds(step):
    source = inspect.getsource(step).replace(step.__doc__, "")
    lines = [line for line in source.splitlines() if line.strip(' "')]
    assert len(lines) <= 30
    number = LADDER.index(step) + 1
    assert step.__doc__.startswith(f"Step {number} ")
    assert step.__base__ is ([nn.Module, *LADDER][number - 1])
