"""The check of one step: right wrappers in several styles pass, every planted fault is named."""

import pytest
from planted import assert_is_named, assert_passes
from planted_same_start import RIGHT_ELSEWHERE, SAME_START

pytestmark = pytest.mark.same_start


@pytest.mark.parametrize("cls", [*SAME_START.right, *RIGHT_ELSEWHERE])
def test_a_right_wrapper_passes(cls):
    assert_passes(SAME_START, cls)


@pytest.mark.parametrize(("cls", "words"), SAME_START.wrong)
def test_a_planted_fault_is_named(cls, words):
    assert_is_named(SAME_START, cls, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("cls", "words"), SAME_START.rare)
def test_a_rarer_fault_is_named(cls, words):
    assert_is_named(SAME_START, cls, words)
