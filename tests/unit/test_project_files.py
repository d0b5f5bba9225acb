"""pyproject.toml, constraints.txt, environment.yml and the Makefile say the same."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEPENDENCIES = [
    Requirement(line) for line in sum(EXTRAS.values(), start=list(PROJECT["dependencies"]))
]


def read_pins():
    """{name: its pins}, several where the versions differ by Python or platform."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    return pins


PINS = read_pins()


def version(pin):
    found = re.fullmatch(r"==([\w.]+)", str(pin.specifier))
    assert found, f"{pin} is not pinned to one version"
    return Version(found[1])


def pin_for(name, python):
    """The version pinned for a Linux machine with this Python."""
    where = {"python_version": python, "python_full_version": f"{python}.9"}
    where |= {"sys_platform": "linux", "os_name": "posix"}
    found = [p for p in PINS.get(name, ()) if p.marker is None or p.marker.evaluate(where)]
    assert len(found) == 1, f"{name} has {len(found)} pins on Python {python}"
    return version(found[0])


NEEDED = [
    (dependency, python)
    for dependency in DEPENDENCIES
    for python in ("3.10", "3.11", "3.12", "3.13", "3.14")
    if dependency.marker is None or dependency.marker.evaluate({"python_version": python})
]


@pytest.mark.parametrize(("dependency", "python"), NEEDED, ids=str)
def test_every_dependency_is_pinned_inside_its_range(dependency, python):
    pinned = pin_for(canonicalize_name(dependency.name), python)
    assert pinned in dependency.specifier


def test_what_was_tested_is_torch_2_13():
    assert [str(pin) for pin in PINS["torch"]] == ["torch==2.13.0"]


def test_all_pins_are_exact():
    assert all(version(pin) for pins in PINS.values() for pin in pins)


def test_conda_installs_this_project_with_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    allowed = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert environment["name"] == PROJECT["name"]
    assert pip == "pip"
    assert Version(python.removeprefix("python=")) in allowed
    assert packages == {"pip": ["-c constraints.txt", f"-e .[{','.join(sorted(EXTRAS))}]"]}


def test_makefile_installs_extras_that_exist():
    asked = re.findall(r"^\t\$\(SETUP\) (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {name for line in asked for name in line.split()} == set(EXTRAS)


def test_oldest_python_is_the_same_everywhere():
    script = (ROOT / "tools" / "make_venv.py").read_text()
    major, minor = re.search(r"^OLDEST = \((\d+), (\d+)\)$", script, re.MULTILINE).groups()
    assert PROJECT["requires-python"] == f">={major}.{minor}"
