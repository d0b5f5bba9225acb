"""``check`` itself: its arguments, its result, its report, wrappers that hang or crash."""

import os
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch
from planted_average import Summed
from planted_forward import Plain
from torch import nn

from ddp_teach.exercises import STEPS, CheckFailed, check
from ddp_teach.launch import launch


def test_steps_in_their_order():
    names = "forward same_start average overlap buckets no_sync unused join"
    assert " ".join(STEPS) == names
    assert all(STEPS.values())


@pytest.mark.parametrize(
    ("cls", "step", "more", "error", "words"),
    [
        (Plain(nn.Identity()), "forward", {}, TypeError, ["cls", "class itself", "Plain"]),
        (dict, "forward", {}, TypeError, ["cls", "torch.nn.Module", "dict"]),
        (print, "forward", {}, TypeError, ["cls", "torch.nn.Module", "print"]),
        (None, "forward", {}, TypeError, ["cls", "torch.nn.Module", "None"]),
        ("Plain", "forward", {}, TypeError, ["cls", "torch.nn.Module", "'Plain'"]),
        (Plain, "foward", {}, ValueError, ["step", "'forward', 'same_start'", "'foward'"]),
        (Plain, "Forward", {}, ValueError, ["step", "'Forward'"]),
        (Plain, "", {}, ValueError, ["step", "''"]),
        (Plain, 3, {}, TypeError, ["step", "'forward'", "3 (int)"]),
        (Plain, None, {}, TypeError, ["step", "'forward'", "None"]),
        (Plain, ["forward"], {}, TypeError, ["step", "['forward'] (list)"]),
        (
            *(Plain, "forward", {"raise_on_failure": 1}, TypeError),
            ["raise_on_failure", "True or False", "1 (int)"],
        ),
    ],
)
def test_an_argument_that_can_not_be_used_is_told_in_one_line(cls, step, more, error, words):
    with pytest.raises(error) as caught:
        check(cls, step, **more)
    message = str(caught.value)
    assert message.startswith("check: ") and "\n" not in message
    assert [word for word in words if word not in message] == []


def test_what_a_pass_looks_like(capsys):
    result = check(Plain, step="forward")
    assert capsys.readouterr().out == (
        "Plain, step 'forward', on 2 and 3 ranks\n  forward     passed\n"
    )
    assert result.passed and bool(result) and result.hints == ()
    assert repr(result) == (
        "CheckResult(passed=True, step='forward', steps_passed=('forward',), hints=())"
    )


REPORT = """\
Summed, step 'average', on 2 and 3 ranks
  forward     passed
  same_start  passed
  average     not yet
    Tried on 2 ranks: one layer of two parameters; in every iteration another rank is late.
    gradient of first[0, 0] in iteration 1:
            expected  got
    rank 0  1.5       3
    rank 1  1.5       3
    Hint: gradients are 2.0 times too large on both ranks: summed, not averaged. Divide by the
          world size.
"""
HINT = (
    "gradients are 2.0 times too large on both ranks: summed, not averaged. Divide by the world "
    "size."
)


def test_what_a_mistake_looks_like(capsys):
    result = check(Summed, step="average")
    assert capsys.readouterr().out == REPORT
    assert not result.passed and not bool(result)
    assert result.steps_passed == ("forward", "same_start") and result.hints == (HINT,)


def test_it_raises_for_autograders_when_asked_to(capsys):
    with pytest.raises(CheckFailed) as caught:
        check(Summed, step="average", raise_on_failure=True)
    assert str(caught.value) == REPORT.rstrip()
    assert caught.value.result.hints == (HINT,)
    assert capsys.readouterr().out == ""
    assert check(Plain, step="forward", raise_on_failure=True).passed


class Talks(Plain):
    def forward(self, *inputs, **kwargs):
        print("here I am")
        self.module(*inputs, **kwargs)


def test_what_the_wrapper_prints_is_shown_where_it_fails(capsys):
    check(Talks, step="forward")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.count("[rank 0] here I am") == lines.count("[rank 1] here I am") == 5
    assert "[rank 1] ... and 8 lines more" in lines


class SaysNothingWhenRight(Plain):
    def forward(self, *inputs, **kwargs):
        print("here I am")
        return self.module(*inputs, **kwargs)


def test_what_the_wrapper_prints_is_not_shown_where_it_passes(capsys):
    assert check(SaysNothingWhenRight, step="forward").passed
    assert "here I am" not in capsys.readouterr().out


class Hangs(Plain):
    def forward(self, *inputs, **kwargs):
        while True:
            pass


class Dies(Plain):
    def forward(self, *inputs, **kwargs):
        os._exit(7)


class Aborts(Plain):
    def forward(self, *inputs, **kwargs):
        os.abort()


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Hangs, ["wrapper(x) does not come to an end on rank 0", "never leaves a loop"]),
        (Dies, ["exited with code 7", "during wrapper(x)"]),
        (Aborts, ["was ended by SIGABRT", "during wrapper(x)"]),
    ],
)
def test_a_wrapper_that_hangs_or_crashes_is_reported_and_leaves_nothing(cls, words, capsys):
    result = check(cls, step="forward")
    assert [word for word in words if word not in result.hints[0]] == []
    out = capsys.readouterr().out
    assert "test_exercises_check.py, line" in out or cls is Dies
    assert "/" not in out.replace("[rank", ""), "a path of this machine"
    ours = psutil.Process().children(recursive=True)
    assert not [p for p in ours if "ddp_teach" in " ".join(p.cmdline()) and p.num_threads() > 9]
    assert launch(torch.distributed.get_rank) == [0, 1]


class InOneLine(Plain):
    # fmt: off
    def forward(self, *inputs, **kwargs): raise NotImplementedError("pass the inputs on")
    # fmt: on


class SaysWhy(Plain):
    def forward(self, *inputs, **kwargs):
        raise TypeError("This can't work. The reason comes second.")


@pytest.mark.parametrize(
    ("cls", "hint"),
    [
        (InOneLine, "Still to do: pass the inputs on."),
        (SaysWhy, "raised TypeError: This can't work. The reason comes second."),
    ],
)
def test_what_an_exception_says_is_told_whole(cls, hint):
    assert hint in check(cls, step="forward").hints[0]


IN_A_CELL = """
    from torch import nn
    from ddp_teach.exercises import check

    class Mine(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs, **kwargs):
            return helper(self.module, inputs, kwargs)

    def helper(module, inputs, kwargs):
        return module(*inputs, **kwargs)

    check(Mine, step="forward")

    def helper(module, inputs, kwargs):
        raise ValueError("not like this")

    check(Mine, step="forward")
"""


def test_a_class_and_its_helpers_may_be_defined_in_a_script_or_cell():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_A_CELL)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [
        "Mine, step 'forward', on 2 and 3 ranks",
        "  forward     passed",
    ]
    assert "On rank 0 wrapper(x) raised ValueError: not like this." in done.stdout
