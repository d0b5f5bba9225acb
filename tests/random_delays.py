"""Random delays: every rank sleeps for short times at random points, so that races show.

    pytest tests/ranks --random-delays 17

A point is any call of a Python function of the package, of the tests or of torch.distributed: just
before a collective, in a gradient hook, between the start of an all-reduce and the wait for it.
The same seed gives the same test the same delays.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from ddp_teach import rank, rank_process

FOLDERS = tuple(str(Path(module).parent) for module in (rank.__file__, __file__, dist.__file__))
CHANCE = 0.02  # of a delay at a point
MEAN = 0.002  # seconds; every hundredth delay is five times as long or longer

slept = 0  # how often this process has


@contextmanager
def random_delays(seed: int) -> Iterator[None]:
    """Delay the ranks of every launch in the block."""
    with patch.object(rank_process, "main", partial(delayed_main, seed)):
        yield


def delayed_main(
    seed: int, number: int, world_size: int, folder: Path, launcher: Any, environ: dict, *rest: Any
) -> None:
    """In a rank: what ``launch`` runs there, with delays."""
    delays = random.Random(f"{seed} {number} {environ.get('PYTEST_CURRENT_TEST')}")
    sys.setprofile(sleeper(delays))
    rank.main(number, world_size, folder, launcher, environ, *rest)


def sleeper(delays: random.Random) -> Callable[[FrameType, str, Any], None]:
    """Python calls the function that is returned at every call in this thread."""

    def sleep(frame: FrameType, event: str, _: Any) -> None:
        global slept
        here = event == "call" and frame.f_code.co_filename.startswith(FOLDERS)
        if here and delays.random() < CHANCE:
            time.sleep(delays.expovariate(1 / MEAN))
            slept += 1

    return sleep
