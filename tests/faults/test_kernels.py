"""launch in the kernels of notebooks: interrupted, killed, and two at the same time."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from processes import end_session, folders_in, is_alive, ranks_below, wait_for

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends signals")

CELL = """\
import os, time
import torch
import torch.distributed as dist
from ddp_teach import launch

def total(shift):
    value = torch.tensor(dist.get_rank() + shift)
    dist.all_reduce(value)
    return value.item()

def stay():
    time.sleep(100)
"""


class Kernel:
    """A notebook's kernel, in which the cell above has run; ``folder`` is for temporary files."""

    def __init__(self, folder):
        environ = {**os.environ, "TMPDIR": str(folder)}
        self.manager, self.client = start_new_kernel(env=environ)
        self.pid = self.manager.provisioner.pid
        self.run(CELL)

    def run(self, code):
        """What a cell returns, as text."""
        shown = []
        reply = self.client.execute_interactive(code, timeout=60, output_hook=shown.append)
        assert reply["content"]["status"] == "ok", reply["content"]
        results = [m for m in shown if m["msg_type"] == "execute_result"]
        return results[0]["content"]["data"]["text/plain"] if results else None

    def begin_to_stay(self):
        """Begin a launch that lasts; return its message once both ranks are there."""
        message = self.client.execute("launch(stay)")
        assert wait_for(lambda: len(ranks_below(self.pid)) == 2, 60)
        return message

    def end(self):
        end_session(self.pid)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def start_kernel(tmp_path):
    kernels = []

    def start():
        kernels.append(Kernel(tmp_path))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.end()


def test_interrupt(start_kernel):
    kernel = start_kernel()
    message = kernel.begin_to_stay()
    kernel.manager.interrupt_kernel()
    assert wait_for(lambda: ranks_below(kernel.pid) == [], 2)
    reply = {"parent_header": {}}
    while reply["parent_header"].get("msg_id") != message:  # others may have come late
        reply = kernel.client.get_shell_msg(timeout=30)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert kernel.run("launch(total, 10)") == "[21, 21]"


def test_kill(start_kernel, tmp_path):
    kernel = start_kernel()
    kernel.begin_to_stay()
    below = [process.pid for process in psutil.Process(kernel.pid).children(recursive=True)]
    assert len(below) == 4  # the ranks and Python's two servers
    os.kill(kernel.pid, signal.SIGKILL)
    assert wait_for(lambda: not any(map(is_alive, below)), 5)
    assert folders_in(tmp_path) == []


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(2, id="2"),
        pytest.param(20, id="20", marks=[pytest.mark.nightly, pytest.mark.timeout(600)]),
    ],
)
def test_two_notebooks_launch_at_the_same_time(times, start_kernel):
    ours, theirs = start_kernel(), start_kernel()
    with ThreadPoolExecutor() as pool:
        for i in range(times):
            running = pool.submit(theirs.run, f"launch(total, {100 + i}, nprocs=3)")
            assert ours.run(f"launch(total, {i})") == str([2 * i + 1] * 2)
            assert running.result() == str([3 * (100 + i) + 3] * 3)
