"""Torch's tests change the environment as they like; this pytest run is theirs alone."""

import pytest


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was():
    """Nothing is asked of torch's own tests."""
