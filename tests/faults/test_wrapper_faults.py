"""Faults inside a training step with the wrapper: who is named, how soon, and what is told."""

import os
import re
import signal
import time

import failing
import pytest
import wrapped
from processes import folders, ranks_below

from ddp_teach import failures
from ddp_teach.launch import LaunchError, LaunchTimeout, launch

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends signals")

SOON = 5.0  # seconds from a fault to its report: what is promised, not how fast it is
CAUSES = {
    "raise": ("raised ValueError: on purpose", 1),
    "exit": ("exited with code 9 before its function returned", 9),
    "SIGKILL": ("was ended by SIGKILL", -signal.SIGKILL),
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test no rank lives and no folder is left."""
    yield
    assert ranks_below() == []
    assert folders() == set()


@pytest.fixture
def impatient(monkeypatch):
    """A stopped rank gives no answer, however long it is waited for."""
    monkeypatch.setattr(failures, "ANSWER_LIMIT", 1.0)


def fault(place, how, folder, timeout):
    """The error of a launch in which rank 1 goes wrong, and the seconds from then to the error."""
    nprocs = 3 if place is wrapped.in_a_collective else 2
    with pytest.raises(LaunchError) as caught:
        launch(wrapped.go_wrong, place, how, folder, nprocs=nprocs, timeout=timeout)
    return caught.value, time.time() - (folder / "fault").stat().st_mtime


WAYS = [
    (place, how)
    for place in wrapped.PLACES
    for how in CAUSES
    # a function that waits in a collective can't raise
    if not (place is wrapped.in_a_collective and how == "raise")
]


@pytest.mark.parametrize("place, how", WAYS, ids=lambda part: getattr(part, "__name__", part))
def test_the_rank_and_its_cause_are_named(place, how, tmp_path):
    error, seconds = fault(place, how, tmp_path, timeout=60)
    message, exitcode = CAUSES[how]
    first = str(error).splitlines()[0]
    assert (first, error.rank, error.exitcode) == (f"rank 1 {message}", 1, exitcode)
    assert not isinstance(error, LaunchTimeout)
    assert seconds < SOON


@pytest.mark.parametrize("place", wrapped.PLACES, ids=lambda place: place.__name__)
def test_a_stopped_rank_is_named(place, tmp_path, impatient):
    error, seconds = fault(place, "SIGSTOP", tmp_path, timeout=1.0)
    assert isinstance(error, LaunchTimeout)
    lines = str(error).splitlines()
    assert lines[0] == "not all ranks returned within 1 s"
    assert "rank 1 gives no answer: it is stopped, or held up outside Python" in lines
    assert seconds < 1.0 + SOON


@pytest.mark.parametrize("how", [*CAUSES, "SIGSTOP"])
def test_the_next_launch_works(how, tmp_path, impatient):
    fault(wrapped.in_backward, how, tmp_path, timeout=1.0 if how == "SIGSTOP" else 60)
    assert launch(failing.ok) == [2.0, 2.0]


# A hang: where every rank stands, for which bucket it waits, and who has not sent theirs.

SKIPPED = """\
waits for bucket 0 of 3 (2.weight), which rank 1 has not sent
  wrapped.py, line N, in skips_backward
    loss.backward()
"""
HANGS = [
    (
        wrapped.skips_backward,
        2,
        f"rank 0 {SKIPPED}rank 1 has returned\ncollectives started: 9 on rank 0, 6 on rank 1",
    ),
    (
        wrapped.skips_backward,
        3,
        f"rank 0 {SKIPPED}"
        "rank 1 has returned\n"
        f"rank 2 {SKIPPED}"
        "collectives started: 9 on rank 0, 6 on rank 1, 9 on rank 2",
    ),
    (
        wrapped.loops,
        2,
        """\
rank 0 waits for bucket 0 of 3 (2.weight), which rank 1 has not sent
  wrapped.py, line N, in loops
    step(model)
  wrapped.py, line N, in step
    model(ROW).sum().backward()
rank 1 is running
  wrapped.py, line N, in loops
    while dist.get_rank() == 1:
collectives started: 9 on rank 0, 6 on rank 1""",
    ),
    (
        wrapped.one_collective_too_many,
        2,
        """\
rank 0 is running
  wrapped.py, line N, in one_collective_too_many
    dist.all_reduce(torch.ones(1))
rank 1 has returned
collectives started: 7 on rank 0, 6 on rank 1""",
    ),
    (
        wrapped.one_collective_too_many_before,
        2,
        """\
rank 0 waits for bucket 2 of 3 (0.weight), which all ranks have sent
  wrapped.py, line N, in one_collective_too_many_before
    step(model)
  wrapped.py, line N, in step
    model(ROW).sum().backward()
rank 1 has returned
collectives started: 10 on rank 0, 9 on rank 1""",
    ),
    (
        wrapped.stops_in_forward,
        2,
        """\
rank 0 waits for bucket 0 of 3 (3.weight), which all ranks have sent except perhaps rank 1
  wrapped.py, line N, in stops_in_forward
    in_forward(lambda: end_by("SIGSTOP") if dist.get_rank() == 1 else None)
  wrapped.py, line N, in in_forward
    step(wrap(first, InForward(fault), *others))
  wrapped.py, line N, in step
    model(ROW).sum().backward()
rank 1 gives no answer: it is stopped, or held up outside Python""",
    ),
    (
        wrapped.in_groups,
        4,
        """\
rank 0 has returned
rank 1 has returned
rank 2 waits for bucket 0 of 3 (2.weight), which rank 3 has not sent
  wrapped.py, line N, in in_groups
    step(model)
  wrapped.py, line N, in step
    model(ROW).sum().backward()
rank 3 has returned""",
    ),
    (
        wrapped.joined,
        2,
        """\
rank 0 waits for bucket 0 of 3 (2.weight), which rank 1 has not sent
  wrapped.py, line N, in joined
    with model.join():
rank 1 is running
  wrapped.py, line N, in joined
    time.sleep(0.01)
collectives started: 13 on rank 0, 10 on rank 1""",
    ),
    (
        wrapped.in_another_thread,
        2,
        """\
rank 0 waits for bucket 0 of 3 (2.weight), which rank 1 has not sent
  wrapped.py, line N, in in_another_thread
    thread.join()
rank 1 has returned
collectives started: 5 on rank 0, 2 on rank 1""",
    ),
]


@pytest.mark.parametrize("fn, nprocs, told", HANGS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_hang_is_told(fn, nprocs, told, impatient):
    with pytest.raises(LaunchTimeout) as caught:
        launch(fn, nprocs=nprocs, timeout=1.0)
    text = re.sub(r"line \d+", "line N", str(caught.value))
    assert text == f"not all ranks returned within 1 s\n{told}"
