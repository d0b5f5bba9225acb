"""What ranks do whose launching process is gone while they begin: all end, and no folder stays."""

import contextlib
import itertools
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="ranks end each other with signals")

RANK = """
import multiprocessing, sys
from multiprocessing import util
from pathlib import Path
from ddp_teach.ending import end_all_ranks, tell, watch_for_death
from ddp_teach.rank import RUNNING

util.get_temp_dir()
print("begun", flush=True)
sys.stdin.readline()
folder = Path(sys.argv[1])
"""
END_ALL = RANK + "end_all_ranks(folder)\n"
TELL = (
    RANK
    + """
here, there = multiprocessing.Pipe()
there.close()
tell(here, RUNNING, folder)
"""
)
BEGIN_LATE = (
    RANK
    + """
watch_for_death(1, folder)
print("not reached", flush=True)
"""
)
BEGIN_MEANWHILE = (
    RANK
    + """
import threading
from ddp_teach.rank import run_call

threading.Thread(target=end_all_ranks, args=(folder,)).start()
while folder.exists():
    pass
run_call(0, 2, folder, None, 10)
"""
)
BEGIN_OFTEN = (
    RANK
    + """
for _ in range(200):
    watch_for_death(1, folder)
"""
)


@pytest.fixture
def begin(tmp_path):
    """Begins a program that does, when a line comes in, what a rank with this folder does."""
    processes = []

    def start(program, folder):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        processes.append(process)
        assert process.stdout.readline() == "begun\n", process.communicate()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "ddp_teach-of-a-launch"
    folder.mkdir()
    return folder


def test_a_rank_that_begins_while_others_are_being_ended(begin, folder):
    rank = begin(BEGIN_LATE, folder)
    (folder / "ending").touch()
    assert rank.communicate("\n", timeout=10) == ("", "")
    assert rank.returncode == 1


def left_in(temporary):
    return [path.name for path in temporary.iterdir()]


def test_a_rank_begins_while_another_of_its_threads_ends_all(begin, folder, tmp_path):
    for i in range(2_000):  # to remove these takes a moment
        (folder / f"{i}.stack").touch()
    rank = begin(BEGIN_MEANWHILE, folder)
    assert rank.communicate("\n", timeout=10) == ("", "")
    assert rank.returncode == 1
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("program", [END_ALL, TELL], ids=["end_all_ranks", "tell"])
def test_the_rank_that_notices_ends_all(program, begin, folder, tmp_path):
    other = begin(RANK + "print('not reached', flush=True)\n", folder)
    (folder / "1.pid").write_text(str(other.pid))
    notices = begin(program, folder)
    assert notices.communicate("\n", timeout=10) == ("", "")
    assert notices.returncode == 1
    assert other.communicate(timeout=10) == ("", "")
    assert [name for name in left_in(tmp_path) if not name.startswith("pymp-")] == []
    # the folder of `other` stays: in a launch all ranks have one in common, that of the server
    assert len(left_in(tmp_path)) == 1


def test_a_rank_that_has_just_begun_makes_files_meanwhile(begin, folder):
    for i in range(2_000):  # to remove these takes a moment
        (folder / f"{i}.stack").touch()
    notices = begin(END_ALL, folder)
    notices.stdin.write("\n")
    notices.stdin.flush()
    until = time.monotonic() + 0.5
    with contextlib.suppress(FileNotFoundError):  # the folder is gone
        for i in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
            (folder / f"{i}.out").touch()
    assert notices.communicate(timeout=10) == ("", "")
    assert not folder.exists()


def test_a_process_id_is_whole_whenever_it_is_read(begin, folder):
    rank = begin(BEGIN_OFTEN, folder)
    rank.stdin.write("\n")
    rank.stdin.flush()
    read = set()
    while rank.poll() is None:
        read |= {file.read_text() for file in folder.glob("*.pid")}
    assert rank.communicate() == ("", "")
    assert read == {str(rank.pid)}
