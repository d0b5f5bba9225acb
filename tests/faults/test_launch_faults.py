"""launch when things go wrong: what is told, that it ends, and that nothing is left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import failing
import psutil
import pytest
from processes import end_session, folders, folders_in, is_alive, ranks_below, wait_for

from ddp_teach.launch import LaunchError, LaunchTimeout, launch

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends signals")
LAUNCH = sys.modules[launch.__module__]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test no rank lives and no folder is left; the next test launches again."""
    yield
    assert ranks_below() == []
    assert folders() == set()


def failure_of(fn, *args, timeout=60, **kwargs):
    with pytest.raises(LaunchError) as caught:
        launch(fn, *args, timeout=timeout, **kwargs)
    return caught.value


# A rank fails: it is named, with its cause, and not the others' broken connections.

CAUSES = {
    "raise": ("raised ValueError: on purpose", 1),
    "exit": ("exited with code 9 before its function returned", 9),
    "sys.exit": ("raised SystemExit: 3", 1),
    "segfault": ("was ended by SIGSEGV", -signal.SIGSEGV),
    "SIGABRT": ("was ended by SIGABRT", -signal.SIGABRT),
    "SIGKILL": ("was ended by SIGKILL", -signal.SIGKILL),
    "SIGTERM": ("was ended by SIGTERM", -signal.SIGTERM),
    "SIGINT": ("was ended by SIGINT", -signal.SIGINT),
}


@pytest.mark.parametrize("place", failing.PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("how", CAUSES)
def test_the_cause_is_told(how, place):
    error = failure_of(place, how)
    message, exitcode = CAUSES[how]
    first = str(error).splitlines()[0]
    assert (first, error.rank, error.exitcode) == (f"rank 1 {message}", 1, exitcode)
    assert not isinstance(error, LaunchTimeout)
    if how in ("raise", "segfault"):
        assert "in end_by" in error.traceback


def test_an_exception_that_cannot_be_printed():
    error = failure_of(failing.raises_mute)
    assert str(error).splitlines()[0] == "rank 0 raised failing.Mute: <exception str() failed>"


def test_a_result_that_cannot_be_unpickled():
    error = failure_of(failing.returns_one_way)
    reason = "ValueError: on purpose"
    assert str(error) == f"what rank 1 returned can't be unpickled here: {reason}"
    assert error.rank == 1


def test_a_traceback_is_short_and_has_no_path():
    error = failure_of(failing.before_the_first_collective, "raise", nprocs=3)
    assert str(error) == (
        "rank 1 raised ValueError: on purpose\n"
        "  failing.py, line {}, in before_the_first_collective\n"
        "    end_by(how)\n"
        "  failing.py, line {}, in end_by\n"
        '    raise ValueError("on purpose")'
    ).format(*lines_of("    end_by(how)\n    dist.all_reduce", 'raise ValueError("on purpose")'))
    assert str(Path(failing.__file__)) in error.traceback
    assert error._render_traceback_() == [f"LaunchError: {error}"]  # what a notebook shows


def lines_of(*texts):
    source = Path(failing.__file__).read_text()
    return [source[: source.index(text)].count("\n") + 1 for text in texts]


def test_of_several_failures_the_lowest_rank_is_told():
    assert failure_of(failing.all_raise).rank == 0


def test_a_lost_connection_in_other_words_is_no_cause():
    assert (failure_of(failing.hides_the_lost_connection).rank) == 1


def test_one_rank_ignores_sigterm():
    assert str(failure_of(failing.deaf, "exit")).startswith("rank 1 exited with code 9")


def test_result_that_cannot_be_sent():
    message = str(failure_of(failing.not_sendable))
    assert message.startswith(
        "rank 0 raised TypeError: the result must be something that can be pickled, to be sent "
        "back, got <failing.NotOnARank object"
    )
    assert "\n" not in message


def test_argument_that_cannot_be_unpacked():
    message = str(failure_of(failing.take, failing.OnlyHere()))
    assert message.startswith("rank 0 raised ValueError: invalid literal for int()")


def test_ranks_that_leave_things_behind():
    assert launch(failing.leaves_things_behind) == [0, 1]


def test_rank_that_ends_its_group():
    assert launch(failing.destroys_its_group) == ["fine", "fine"]


# Time is up: every rank says where it stands.


def timeout_of(fn, *args, timeout=1.5):
    error = failure_of(fn, *args, timeout=timeout)
    assert isinstance(error, LaunchTimeout)
    assert isinstance(error, TimeoutError)
    assert error.rank is None
    return str(error)


def test_one_collective_too_many():
    (line,) = lines_of("dist.all_reduce(torch.ones(2))\n\n\ndef skips_backward")
    assert timeout_of(failing.one_too_many) == (
        "not all ranks returned within 1.5 s\n"
        "rank 0 is running\n"
        f"  failing.py, line {line}, in one_too_many\n"
        "    dist.all_reduce(torch.ones(2))\n"
        "rank 1 has returned\n"
        "collectives started: 2 on rank 0, 1 on rank 1"
    )


def test_a_rank_skips_backward():
    lines = lines_of("y.sum().backward()\n\n\ndef busy", "dist.all_reduce(gradient)")
    assert timeout_of(failing.skips_backward) == (
        "not all ranks returned within 1.5 s\n"
        "rank 0 is running\n"
        f"  failing.py, line {lines[0]}, in skips_backward\n"
        "    y.sum().backward()\n"
        f"  failing.py, line {lines[1]}, in backward\n"
        "    dist.all_reduce(gradient)\n"
        "rank 1 has returned\n"
        "collectives started: 1 on rank 0, 0 on rank 1"
    )


def test_endless_loop():
    (line,) = lines_of("pass\n\n\ndef stopped")
    message = timeout_of(failing.busy)
    assert message.count(" in busy\n") == 2
    assert f"line {line}" in message or f"line {line - 1}" in message


def test_a_stopped_rank():
    message = timeout_of(failing.stopped)
    assert "\nrank 0 is running\n" in message
    assert "\nrank 1 gives no answer: it is stopped, or held up outside Python" in message


def test_what_a_rank_waits_for():
    message = timeout_of(failing.says_what_it_waits_for, "bucket 1 of 3 (weight, bias)")
    assert "\nrank 0 waits for bucket 1 of 3 (weight, bias)\n  failing.py, line" in message
    assert "\nrank 0 is running\n" in timeout_of(failing.says_what_it_waits_for, "")


def test_ranks_that_never_start(monkeypatch):
    monkeypatch.setattr(LAUNCH, "START_LIMIT", 2.0)
    message = timeout_of(failing.take, failing.SlowToArrive())
    assert message.startswith("not all ranks were running within 2 s\nrank 0 is starting\n")


# The launching process is interrupted or dies.

PARENT = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
import failing
from ddp_teach.launch import launch
folder = Path(sys.argv[1])
try:
    launch(failing.long, folder, *sys.argv[2:])
except KeyboardInterrupt:
    print("interrupted")
print(launch(failing.ok))
"""


@pytest.fixture
def parent(tmp_path):
    """Start a launch in a process of its own; wait until its ranks run; return both."""
    started = []
    folder = tmp_path / "pids"
    folder.mkdir()

    def start(*args):
        script = tmp_path / "parent.py"
        script.write_text(PARENT.format(path=[os.path.dirname(__file__)]))
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        started.append(process)
        files = [folder / f"pid{rank}" for rank in range(2)]
        assert wait_for(lambda: all(file.exists() and file.read_text() for file in files), 60)
        pids = [int(file.read_text()) for file in files]
        if "SIGSTOP" in args:
            stopped = psutil.STATUS_STOPPED
            assert wait_for(lambda: psutil.Process(pids[1]).status() == stopped)
        assert all(map(is_alive, pids))
        return process, pids

    yield start
    for process in started:
        end_session(process.pid)
        process.communicate()


EARLY = """
from ddp_teach.launch import launch
import failing
print("launching", flush=True)
try:
    launch(failing.ok)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(launch(failing.ok))
"""


def test_interrupt_of_a_first_launch_before_its_ranks_run():
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY],
        cwd=os.path.dirname(__file__),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "launching\n"
    time.sleep(0.3)  # torch alone takes longer to import
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60) == ("interrupted\n[2.0, 2.0]\n", "")


def all_ended(pids):
    return not any(map(is_alive, pids))


@pytest.mark.parametrize(
    "whom, twice", [("terminal", False), ("script", False), ("terminal", True)]
)
def test_interrupt(whom, twice, parent, tmp_path):
    process, pids = parent()
    servers = [server.pid for server in psutil.Process(process.pid).children()]
    interrupt = os.killpg if whom == "terminal" else os.kill
    interrupt(process.pid, signal.SIGINT)
    if twice:
        time.sleep(0.05)
        interrupt(process.pid, signal.SIGINT)
    assert wait_for(lambda: all_ended(pids), 2)
    process.wait(60)
    assert wait_for(lambda: all_ended(servers), 1)
    if not twice:
        assert process.communicate() == ("interrupted\n[2.0, 2.0]\n", "")
    assert folders_in(tmp_path) == []


@pytest.mark.parametrize("stopped", [False, True], ids=["all run", "one is stopped"])
def test_launching_process_is_killed(stopped, parent, tmp_path):
    process, pids = parent(*["SIGSTOP"] * stopped)
    servers = psutil.Process(process.pid).children()
    process.kill()
    assert wait_for(lambda: all_ended(pids), 5)
    assert wait_for(lambda: all_ended([server.pid for server in servers]), 5)
    assert folders_in(tmp_path) == []


def test_server_is_killed():
    servers = [
        child
        for child in psutil.Process().children()
        if "multiprocessing.forkserver" in " ".join(child.cmdline())
    ]
    for server in servers:
        server.kill()
    assert wait_for(lambda: all_ended([server.pid for server in servers]))
    assert launch(failing.ok) == [2.0, 2.0]


def launch_some(times):
    return [launch(failing.ok, nprocs=2) for _ in range(times)]


def test_two_processes_launch_at_the_same_time():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        other.submit(launch_some, 1).result()  # both have what they need for a quick start
        theirs = other.submit(launch_some, 10)
        assert launch_some(10) == theirs.result() == [[2.0, 2.0]] * 10
