"""The check of one step: right wrappers in several styles pass, every planted fault is named."""

import pytest
from planted import assert_is_named, assert_passes
from planted_forward import FORWARD, RIGHT_ELSEWHERE

pytestmark = pytest.mark.forward


@pytest.mark.parametrize("cls", [*FORWARD.right, *RIGHT_ELSEWHERE])
def test_a_right_wrapper_passes(cls):
    assert_passes(FORWARD, cls)


@pytest.mark.parametrize(("cls", "words"), FORWARD.wrong)
def test_a_planted_fault_is_named(cls, words):
    assert_is_named(FORWARD, cls, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("cls", "words"), FORWARD.rare)
def test_a_rarer_fault_is_named(cls, words):
    assert_is_named(FORWARD, cls, words)
