"""The check of one step: right wrappers in several styles pass, every planted fault is named."""

import pytest
from planted import assert_is_named, assert_passes
from planted_average import AVERAGE, RIGHT_ELSEWHERE

pytestmark = pytest.mark.average


@pytest.mark.parametrize("cls", [*AVERAGE.right, *RIGHT_ELSEWHERE])
def test_a_right_wrapper_passes(cls):
    assert_passes(AVERAGE, cls)


@pytest.mark.parametrize(("cls", "words"), AVERAGE.wrong)
def test_a_planted_fault_is_named(cls, words):
    assert_is_named(AVERAGE, cls, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("cls", "words"), AVERAGE.rare)
def test_a_rarer_fault_is_named(cls, words):
    assert_is_named(AVERAGE, cls, words)
