"""Buckets: cut as torch cuts them, and flat tensors that hold each gradient where it belongs."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ddp_teach.buckets import (
    MIB,
    Bucket,
    assign_buckets,
    bucket_caps,
    strides_in_bucket,
)
from ddp_teach.special_buckets import GradientBucket, SparseBucket

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


# Which parameter goes into which bucket.


@st.composite
def parameter_lists(draw, dtypes=DTYPES):
    """Tensors of 0 to 40 elements and several dtypes, and for each whether it is sparse."""
    kinds = st.tuples(st.integers(0, 40), st.sampled_from(dtypes), st.booleans())
    drawn = draw(st.lists(kinds, min_size=1, max_size=20))
    params = [torch.zeros(numel, dtype=dtype) for numel, dtype, _ in drawn]
    any_sparse = draw(st.booleans())
    return params, [sparse and any_sparse for _, _, sparse in drawn]


CAPS = st.lists(st.integers(1, 300), min_size=1, max_size=3)


@given(parameter_lists(), CAPS)
def test_buckets_are_cut_as_torch_cuts_them(drawn, caps):
    params, sparse = drawn
    expected, _ = dist._compute_bucket_assignment_by_size(params, caps, sparse)
    # torch sorts them by their first parameter; here the caller does so, where it is wanted
    assert sorted(assign_buckets(params, caps, sparse), key=min) == expected


@given(parameter_lists(dtypes=[torch.float32]), CAPS, st.randoms())
def test_buckets_in_an_order_that_was_learned_come_as_torchs_come(drawn, caps, random):
    params, sparse = drawn
    order = random.sample(range(len(params)), len(params))
    sparse_by_index = [sparse[order.index(i)] for i in range(len(params))]
    expected, _ = dist._compute_bucket_assignment_by_size(params, caps, sparse_by_index, order)
    got = assign_buckets(params, caps, sparse)
    assert [[order[k] for k in bucket] for bucket in got] == expected


@given(parameter_lists())
def test_without_a_cap_there_is_one_bucket_per_dtype(drawn):
    params, _ = drawn
    buckets = assign_buckets(params, None)
    assert [len({params[i].dtype for i in b}) for b in buckets] == [1] * len(buckets)
    assert len(buckets) == len({p.dtype for p in params})
    assert sorted(i for b in buckets for i in b) == list(range(len(params)))


def test_a_bucket_may_exceed_its_cap_by_part_of_one_parameter_and_the_last_cap_holds_on():
    params = [torch.zeros(n) for n in (2, 1, 3, 1, 4, 5, 1)]  # 8, 4, 12, 4, 16, 20 and 4 bytes
    assert assign_buckets(params, [8, 16]) == [[0], [1, 2], [3, 4], [5], [6]]


def test_without_arguments_the_first_cap_is_1_mib_and_the_others_25():
    assert bucket_caps() == [MIB, 25 * MIB]
    assert bucket_caps(25) == [25 * MIB]
    assert bucket_caps(None, [0.5, 2]) == bucket_caps(3, [0.5, 2]) == [MIB // 2, 2 * MIB]


# Where a gradient lies inside its bucket.


@st.composite
def layouts(draw):
    """A parameter of 0 to 4 dimensions: contiguous, permuted, or with gaps in memory."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if draw(st.booleans()):
        shape = [max(n, 1) for n in shape]
    plain = torch.randn(shape)
    turned = plain.permute(draw(st.permutations(range(len(shape)))))
    with_gaps = torch.randn([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
    return nn.Parameter(draw(st.sampled_from([plain, turned, with_gaps])))


def with_gradients(params):
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def bucket_of(params, kind=Bucket):
    return kind(range(len(params)), params, [f"p{i}" for i in range(len(params))])


SOME = st.lists(layouts(), min_size=1, max_size=5)


@given(layouts(), st.integers(0, 3))
@example(nn.Parameter(torch.randn(())), 1)
@example(nn.Parameter(torch.randn(0)), 1)
@example(nn.Parameter(torch.randn(1, 1)), 1)
@example(nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)), 1)
@example(nn.Parameter(torch.randn(4, 1, 2, 2).to(memory_format=torch.channels_last)), 1)
def test_a_view_is_a_straight_piece_of_the_flat_tensor(param, offset):
    flat = torch.zeros(offset + param.numel() + 2)
    view = flat.as_strided(param.shape, strides_in_bucket(param), offset)
    assert view.shape == param.shape
    if is_dense(param):
        assert view.stride() == param.stride()
    view.fill_(1)
    assert flat.tolist() == [0] * offset + [1] * param.numel() + [0] * 2


def is_dense(tensor):
    """The elements lie without gaps, in whatever order."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


def same(got, expected):
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@given(SOME, st.integers(1, 5), st.booleans())
def test_pack_divides_every_gradient_and_unpack_brings_them_back(params, divisor, reciprocal):
    with_gradients(params)
    expected = [p.grad * (1 / divisor) if reciprocal else p.grad / divisor for p in params]
    gradients = [p.grad for p in params]
    bucket = bucket_of(params)
    bucket.pack(divisor, reciprocal)
    assert same(bucket.views, expected)
    assert bucket.flat.numel() == sum(p.numel() for p in params)
    bucket.flat.mul_(2)
    bucket.unpack()
    assert same([p.grad for p in params], [2 * g for g in expected])
    assert all(p.grad is g for p, g in zip(params, gradients, strict=True)), "another tensor"


@given(SOME, st.integers(1, 5), st.booleans())
def test_in_a_gradient_bucket_gradients_are_the_views(params, divisor, reciprocal):
    with_gradients(params)
    before = [p.grad.clone() for p in params]
    bucket = bucket_of(params, GradientBucket)
    assert all(p.grad is v for p, v in zip(params, bucket.views, strict=True))
    assert same(bucket.views, before)
    bucket.pack(divisor, reciprocal)  # nothing is copied, so torch divides in any case
    assert same(bucket.views, [g / divisor for g in before])
    bucket.flat.mul_(2)
    bucket.unpack()
    assert same([p.grad for p in params], [2 * (g / divisor) for g in before])
    for p in params:
        p.grad = None
    bucket.unpack()
    assert all(p.grad is v for p, v in zip(params, bucket.views, strict=True))


def test_a_gradient_bucket_takes_in_new_gradients_multiplied_and_old_ones_divided():
    params = with_gradients([nn.Parameter(torch.empty(50)) for _ in range(3)])
    bucket = bucket_of(params, GradientBucket)
    old, new = params[0].grad.clone(), torch.randn(50)
    params[1].grad, params[2].grad = new, None
    bucket.pack(divisor=3)
    assert not torch.equal(new / 3, new * (1 / 3)), "nothing to tell apart"
    assert same(bucket.views, [old / 3, new * (1 / 3), torch.zeros(50)])
    assert params[0].grad is bucket.views[0] and params[1].grad is bucket.views[1]
    assert params[2].grad is None, "made by unpack, once it is known that some rank has it"


KINDS = pytest.mark.parametrize("kind", [Bucket, GradientBucket])


def three(kind):
    """A bucket whose second parameter has no gradient; indices 7, 8, 9."""
    params = with_gradients([nn.Parameter(torch.empty(2, 2)) for _ in range(3)])
    params[1].grad = None
    return params, kind([7, 8, 9], params, ["a", "b", "c"])


@KINDS
def test_a_missing_gradient_travels_as_zeros_and_is_made_afterwards(kind):
    params, bucket = three(kind)
    bucket.flat.fill_(5)  # left of an earlier pass
    params[0].grad, params[2].grad = torch.ones(2, 2), torch.ones(2, 2)
    bucket.pack()
    assert bucket.flat.tolist() == [1] * 4 + [0] * 4 + [1] * 4
    bucket.flat.fill_(3)
    bucket.unpack()
    assert [p.grad.flatten().tolist() for p in params] == [[3] * 4] * 3


@KINDS
def test_unpack_leaves_those_alone_that_it_is_told_to(kind):
    params, bucket = three(kind)
    bucket.pack()
    bucket.unpack(leave={8})
    assert params[1].grad is None and params[0].grad is not None
    bucket.unpack(leave={7, 8, 9})
    assert params[1].grad is None


def test_unpack_leaves_the_value_alone_as_well():
    params, bucket = three(Bucket)
    bucket.pack()
    mine = params[0].grad.clone()
    bucket.flat.fill_(3)
    bucket.unpack(leave={7})
    assert torch.equal(params[0].grad, mine) and params[2].grad.eq(3).all()


@KINDS
def test_only_what_has_no_gradient_and_got_none_from_others_is_empty(kind):
    params, bucket = three(kind)
    bucket.pack()
    assert bucket.empty_among({7, 8, 9}) == {8} and bucket.empty_among({7, 9}) == set()
    bucket.views[1][0, 0] = 0.5  # another rank had one
    assert bucket.empty_among({8}) == set()


@KINDS
@pytest.mark.parametrize("filler", [0.0, math.nan])
def test_filled_it_sends_as_many_numbers_and_changes_nothing(kind, filler):
    params, bucket = three(kind)
    bucket.pack()
    before = [None if p.grad is None else p.grad.clone() for p in params]
    twin = bucket.filled(filler)
    twin.pack(divisor=2)
    expected = torch.full_like(bucket.flat, filler)
    assert torch.equal(twin.flat.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert twin.begins_with_nan() == math.isnan(filler) and not bucket.begins_with_nan()
    twin.unpack()
    assert params[1].grad is None and same([params[0].grad, params[2].grad], before[::2])


def test_repr_tells_what_is_inside():
    bucket = Bucket([0, 1], [torch.zeros(2, 3), torch.zeros(())], ["weight", "bias"])
    assert repr(bucket) == "Bucket(7 x float32, 28 bytes: weight, bias)"
    assert bucket.nbytes == 28 and bucket.offsets == [0, 6]


# Large gradients: the flat tensor's views take their place instead of being copied.


def one_pass(bucket, params):
    """A backward pass that gives every parameter a gradient of ones, doubled on the way."""
    with torch.no_grad():
        bucket.expect()
        for p in params:
            p.grad = torch.ones_like(p) if p.grad is None else p.grad + 1
        bucket.pack(divisor=2)
        bucket.flat.mul_(4)
        bucket.unpack()
    return [p.grad for p in params]


@pytest.mark.parametrize("size", [10, 1000], ids=["small", "large"])
def test_gradients_that_someone_holds_are_not_changed_by_the_next_pass(size):
    params = [nn.Parameter(torch.zeros(size, size)) for _ in range(2)]
    bucket = bucket_of(params)
    held = one_pass(bucket, params)
    assert bucket.large == (size == 1000) == bucket.gives_views
    for p in params:
        p.grad = None
    again = one_pass(bucket, params)
    assert all(g.eq(2).all() for g in [*held, *again])
    assert not any(g is h for g in again for h in held)


def shared_memory_of(tensor):
    """The memory of ``tensor`` as another process would see it, without any tie to ``tensor``."""
    descriptor, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    storage = torch.UntypedStorage._new_shared_fd_cpu(os.dup(descriptor), nbytes)
    return torch.empty(0).set_(storage)


HOLDS = {
    "a slice": lambda grad: grad[500:, 3],
    "an array": lambda grad: grad.numpy(),
    "its transposed detached self": lambda grad: grad.detach().T,
    "its storage": lambda grad: grad.untyped_storage(),
    "another process": shared_memory_of,
    "a graph": lambda grad: grad * torch.ones((), requires_grad=True),
}


def tensor_of(held):
    """What ``held``, made by one of ``HOLDS``, holds, as a tensor of its own."""
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held)[:10].clone()
    grad_fn = getattr(held, "grad_fn", None)
    return torch.as_tensor(held if grad_fn is None else grad_fn._saved_self).clone()


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_whatever_holds_a_part_of_a_gradient_keeps_its_values(hold):
    params = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(2)]
    bucket = bucket_of(params)
    grads = one_pass(bucket, params)
    held = hold(grads[0])
    before = tensor_of(held)
    assert before.eq(2).all()
    del grads
    for p in params:
        p.grad = None
    one_pass(bucket, params)
    with torch.no_grad():
        bucket.flat.fill_(7)
    assert tensor_of(held).equal(before)


def test_memory_of_gradients_that_nobody_holds_is_used_again():
    params = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(2)]
    bucket = bucket_of(params)
    address = bucket.flat.data_ptr()
    for _ in range(3):
        one_pass(bucket, params)
        assert bucket.flat.data_ptr() == address == params[0].grad.data_ptr()
        for p in params:
            p.grad = None
        # a bucket that had let go of its memory would now get another place
        torch.empty(bucket.numel).fill_(0)


@pytest.mark.parametrize("size", [10, 1000], ids=["small", "large"])
def test_a_gradient_that_is_there_already_stays_the_same_tensor(size):
    params = [nn.Parameter(torch.zeros(size, size)) for _ in range(2)]
    bucket = bucket_of(params)
    params[1].grad = torch.ones(size, size)
    with torch.no_grad():
        bucket.expect()
        mine, params[0].grad = params[1].grad, torch.ones(size, size)
        bucket.pack(divisor=2)
        bucket.unpack()
    assert params[1].grad is mine and mine.eq(0.5).all() and params[0].grad.eq(0.5).all()


# A gradient that holds a few rows only.


def sparse_bucket(rows=(1, 1, 2)):
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor(rows)).sum().backward()
    return layer.weight, SparseBucket([0], [layer.weight], ["weight"])


def test_a_sparse_bucket_sends_its_rows_divided_and_summed_up():
    weight, bucket = sparse_bucket()
    bucket.pack(divisor=2)
    assert bucket.flat.is_coalesced() and bucket.flat._nnz() == 2
    assert bucket.flat.to_dense().tolist() == [[0, 0], [1, 1], [0.5, 0.5], [0, 0]]
    before = weight.grad
    bucket.unpack(leave={0})
    assert weight.grad is before
    bucket.unpack()
    assert weight.grad.to_dense().tolist() == [[0, 0], [1, 1], [0.5, 0.5], [0, 0]]


def test_a_sparse_bucket_without_a_gradient_sends_no_rows():
    weight, bucket = sparse_bucket()
    assert bucket.empty_among({0}) == set()
    spoilt = bucket.filled(math.nan)
    spoilt.pack(divisor=2)
    assert spoilt.begins_with_nan() and spoilt.flat._nnz() == 4
    weight.grad = None
    bucket.pack(divisor=2)
    assert bucket.flat.shape == (4, 2) and bucket.flat._nnz() == 0 and not bucket.begins_with_nan()
    assert bucket.empty_among({0}) == {0}
    other_rank = sparse_bucket()[1]
    other_rank.pack()
    bucket.flat = other_rank.flat
    assert bucket.empty_among({0}) == set()


def test_a_sparse_bucket_refuses_a_dense_gradient_by_name():
    weight, bucket = sparse_bucket()
    weight.grad = torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="weight belongs to a layer with sparse=True"):
        bucket.pack()


def test_an_all_reduce_never_runs_in_memory_that_the_user_may_zero():
    params = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(2)]
    bucket = bucket_of(params)
    given = one_pass(bucket, params)
    with torch.no_grad():
        bucket.expect()
        bucket.pack(divisor=2)
    assert all(p.grad is g for p, g in zip(params, given, strict=True))
    assert not {g.untyped_storage().data_ptr() for g in given} & {bucket.flat.data_ptr()}


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"memory_format": torch.channels_last}])
def test_a_gradient_bucket_follows_a_model_that_is_converted(how):
    model = nn.Conv2d(2, 1, 2, bias=False)
    bucket = bucket_of([model.weight], GradientBucket)
    one_pass(bucket, [model.weight])
    model.to(**how)
    model.weight.grad.fill_(6)
    with torch.no_grad():
        bucket.expect()
        bucket.pack(divisor=2)
    assert bucket.flat.tolist() == [3] * 8
    assert model.weight.grad is bucket.views[0] and bucket.flat.dtype == model.weight.dtype
