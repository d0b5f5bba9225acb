"""What every test gets: nothing that it leaves behind may reach the next one; delays, if wanted."""

import os
import sys

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--random-delays",
        type=int,
        metavar="SEED",
        help="let the ranks of every launch sleep for short times at random points",
    )


def pytest_report_header(config):
    seed = config.getoption("--random-delays")
    return None if seed is None else f"to repeat the random delays: --random-delays {seed}"


@pytest.fixture(autouse=True, scope="session")
def delays(request):
    """What ``--random-delays`` asks for; without it nothing."""
    seed = request.config.getoption("--random-delays")
    if seed is None:
        yield
        return
    from random_delays import random_delays  # not above: with it comes torch

    with random_delays(seed):
        yield


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was():
    """The environment is the same after a test, and no process group is left."""
    before = environment()
    yield
    assert environment() == before, "the test changed os.environ"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "a process group is left"


def environment():
    # pytest names the running test; torch sets a cache folder when it makes its first optimizer
    others = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    return {name: value for name, value in os.environ.items() if name not in others}
