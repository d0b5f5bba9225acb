"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

from ddp_teach.exercises import STEPS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(program, tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )


def test_program_prints_the_number_that_is_shown(tmp_path):
    done = run(blocks("python")[0], tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == (blocks("text")[0], "", 0)


def test_check_for_teachers_prints_what_is_shown(tmp_path):
    done = run(blocks("python")[1], tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == (blocks("text")[1], "", 0)


def test_line_for_ones_own_exercises_holds(tmp_path):
    program, _, line = blocks("python")
    done = run(f"{program}    {line}    print('held')\n", tmp_path)
    assert done.stdout.splitlines()[-1:] == ["held"], done.stderr


def test_steps_that_can_be_checked_are_named_in_order():
    (named,) = re.findall(r"The steps are (.+?);", README, re.DOTALL)
    assert re.findall(r"`(\w+)`", named) == list(STEPS)


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).is_file()]
    assert links
    assert missing == []


def test_table_lists_every_chapter_in_order():
    listed = re.findall(r"^\| \[\d\d [^]]+\]\((notebooks/\d\d_\w+\.ipynb)\)", README, re.MULTILINE)
    chapters = sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    assert listed == chapters


def test_make_targets_named_exist():
    named = set(re.findall(r"\bmake ([a-z-]+)", "".join(blocks("bash"))))
    named |= set(re.findall(r"`make ([a-z-]+)", README))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {"lab", "test"} <= named <= targets
