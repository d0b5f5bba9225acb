"""What a gradient was made of is found from the numbers, whatever the weights are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_teach.exercises.explain import explain
from ddp_teach.exercises.mixture import close, expected_gradients, mixture_of
from ddp_teach.exercises.training import Step

WEIGHTS = st.sampled_from([-1.0, 0.0, 0.25, 1 / 3, 0.5, 1.0, 1.5, 2.0, 4.0])


def steps_of(mixtures, dtype=torch.float32, seed=0):
    """One iteration in which rank r's gradient is the sum of ``mixtures[r][s]`` times rank s's."""
    generator = torch.Generator().manual_seed(seed)
    local = [torch.randn(4, 4, generator=generator).to(dtype) for _ in mixtures]
    return [
        Step(
            local={"w": local[rank]},
            before={"w": None},
            after={"w": sum(weight * g for weight, g in zip(row, local, strict=True))},
            changed=[],
            events=[],
        )
        for rank, row in enumerate(mixtures)
    ]


@st.composite
def square(draw):
    size = draw(st.integers(2, 4))
    return [[draw(WEIGHTS) for _ in range(size)] for _ in range(size)]


@given(square(), st.sampled_from([torch.float32, torch.float64]))
def test_the_weights_of_any_mixture_are_found(mixtures, dtype):
    steps = steps_of(mixtures, dtype)
    for rank, row in enumerate(mixtures):
        mixture = mixture_of("w", rank, steps, None)
        assert mixture.of_ranks("w", len(steps)) == pytest.approx(row, abs=2e-3)
        assert mixture.others("w") == {}


@given(square())
def test_only_the_mean_is_right(mixtures):
    is_mean = all(w == pytest.approx(1 / len(mixtures)) for row in mixtures for w in row)
    assert (list(explain([[step] for step in steps_of(mixtures)])) == []) is is_mean


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_is_right_in_every_dtype(size, dtype):
    steps = steps_of([[1 / size] * size] * size, dtype)
    assert list(explain([[step] for step in steps])) == []


def test_what_does_not_fit_is_not_explained():
    steps = steps_of([[0.5, 0.5], [0.5, 0.5]])
    steps[1].after["w"] = steps[1].local["w"].square()
    assert mixture_of("w", 1, steps, None) is None
    assert "no sum" in next(explain([[step] for step in steps])).hint


def test_several_mixtures_are_none():
    steps = steps_of([[0.5, 0.5], [0.5, 0.5]])
    for step in steps:
        step.local["w"] = torch.ones(4, 4)  # of any rank as much
        step.after["w"] = torch.ones(4, 4)
    assert mixture_of("w", 0, steps, None) is None


def test_what_stood_there_before_counts_once():
    steps = steps_of([[0.5, 0.5], [0.5, 0.5]])
    mean = steps[0].after["w"]
    for step in steps:
        step.before["w"], step.after["w"] = torch.full((4, 4), 5.0), mean + 5
    assert close(expected_gradients(steps)["w"], mean + 5)
    assert list(explain([[step] for step in steps])) == []
    for step in steps:
        step.after["w"] = mean + 10
    assert "count what stood in .grad before backward 2 times" in (
        next(explain([[step] for step in steps])).hint
    )
