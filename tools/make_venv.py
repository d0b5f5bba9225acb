"""Set up .venv with the extras named: python3 tools/make_venv.py course test

Returns at once when .venv already is what pyproject.toml and constraints.txt ask for. What
goes wrong is said in a line or two, never in a traceback. The environment may choose: PYTHON
(the interpreter, as given to make) and PIP_ARGS (more arguments for pip).

Even a Python too old for the course has to read this file up to the line that says so, hence
no syntax newer than Python 2.7.
"""

from __future__ import print_function

import sys

OLDEST = (3, 10)
if sys.version_info < OLDEST:
    sys.exit(
        "ddp_teach needs Python {0}.{1} or newer; {2} is Python {3}.{4}.\n"
        "Name another one: make lab PYTHON=python3.12".format(
            *(OLDEST + (sys.executable,) + tuple(sys.version_info[:2]))
        )
    )

import errno
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(
    VENV, *(["Scripts", "python.exe"] if os.name == "nt" else ["bin", "python"])
)
# Written as "unfinished" before the first step and with what was installed after the last one:
# a .venv that was interrupted half way is told from a finished one by this file alone.
RECORD = os.path.join(VENV, "ddp_teach-setup.json")
LOG = os.path.join(VENV, "ddp_teach-setup.log")

UNREACHABLE = (
    "Failed to establish a new connection",
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "SSLError",
    "Connection aborted",
)


class SetupError(Exception):
    """Set-up can't go on; the message says why and what to do."""


def main(extras):
    """Bring .venv to the wanted state; return the exit status."""
    try:
        record = read_record()
        if is_ready(record, extras):
            return 0
        start = time.time()
        if must_rebuild(record):
            create_venv()
        elif record:
            write_record({"unfinished": True})
        # What is there already stays: installing the test extra must not take the course away.
        extras = sorted(set(extras) | set(record.get("extras", ())))
        install(extras)
        write_record(dict(wanted(), extras=extras, python=version_of(VENV_PYTHON)))
        print("Set-up: .venv is ready after {0:.0f} s".format(time.time() - start))
        return 0
    except SetupError as error:
        print("\n{0}".format(error), file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print("\n{0}".format(disk_full()), file=sys.stderr)
    except KeyboardInterrupt:
        print("\nSet-up was interrupted; the same command starts it again.", file=sys.stderr)
    return 1


def wanted():
    """What .venv depends on: the two files' contents, and the folder, as .venv holds its path."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return {"files": digest.hexdigest(), "folder": ROOT}


def read_record():
    """The record of the last set-up; {} where there is no .venv or it was made by other hands."""
    try:
        with open(RECORD) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError:
        return {"unfinished": True}


def write_record(record):
    with open(RECORD, "w") as file:
        json.dump(record, file)


def is_ready(record, extras):
    now = wanted()
    return (
        all(record.get(key) == now[key] for key in now)
        and set(extras) <= set(record["extras"])
        and not other_python_chosen(record)
        and os.path.exists(VENV_PYTHON)
    )


def must_rebuild(record):
    """True where there is no .venv, or one of ours that can't be brought up to date."""
    if not os.path.exists(VENV):
        return True
    if record:
        return (
            "unfinished" in record
            or record["folder"] != ROOT
            or other_python_chosen(record)
            or not os.path.exists(VENV_PYTHON)
        )
    if not os.path.exists(VENV_PYTHON) or version_of(VENV_PYTHON) < list(OLDEST):
        raise SetupError(
            "There is a .venv that this Makefile did not make and can't use.\n"
            "`make clean` removes it; then run the same command again."
        )
    return False


def other_python_chosen(record):
    """PYTHON is in the environment only if the user gave it; the Makefile's default is not."""
    return "PYTHON" in os.environ and record["python"] != list(sys.version_info[:2])


def version_of(python):
    """[major, minor] of an interpreter; [0, 0] if it doesn't start or has no pip."""
    code = "import sys, pip; print(list(sys.version_info[:2]))"
    try:
        return json.loads(subprocess.check_output([python, "-c", code], stderr=subprocess.DEVNULL))
    except (OSError, subprocess.CalledProcessError):
        return [0, 0]


def check_venv_exists():
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetupError(
            "{0} comes without `venv`, which sets up .venv. On Debian and Ubuntu:\n"
            "apt install python{1}.{2}-venv; then run the same command again.".format(
                sys.executable, *sys.version_info[:2]
            )
        )


def create_venv():
    check_venv_exists()
    if os.path.exists(VENV):
        shutil.rmtree(VENV)
    os.mkdir(VENV)
    write_record({"unfinished": True})
    run([sys.executable, "-m", "venv", VENV])


def install(extras):
    print("Setting up .venv; most of the time goes into torch.")
    command = [VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stdout.isatty():
        command.append("--quiet")
    command += ["--constraint", os.path.join(ROOT, "constraints.txt")]
    command += shlex.split(os.environ.get("PIP_ARGS", ""))
    run(command + ["--editable", "{0}[{1}]".format(ROOT, ",".join(extras))])
    # matplotlib looks through all fonts once, and would say so in the first notebook with a picture
    run([VENV_PYTHON, "-c", "import matplotlib.font_manager"])


def run(command):
    """Run a command; where it fails, say in a line or two what its error output means."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, universal_newlines=True)
    errors = process.communicate()[1]
    if process.returncode == 0:
        return
    if "No space left on device" in errors or "quota exceeded" in errors or is_disk_full():
        raise SetupError(disk_full())
    if any(sign in errors for sign in UNREACHABLE):
        raise SetupError(
            "The package index can't be reached, so .venv is not ready: is the network on?\n"
            "Then run the same command again; behind a proxy, set HTTPS_PROXY first."
        )
    with open(LOG, "w") as file:
        file.write(errors)
    lines = [line for line in errors.splitlines() if line.strip()] or ["nothing was said"]
    causes = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
    raise SetupError("Setting up .venv failed: {0}\nMore is in {1}.".format(causes[0], LOG))


def is_disk_full():
    return min(free_megabytes(folder) for folder in (ROOT, tempfile.gettempdir())) < 20


def free_megabytes(folder):
    return shutil.disk_usage(folder).free // 2**20


def disk_full():
    return (
        "The disk is full: {0} MB are left for .venv and {1} MB in the temporary folder {2}.\n"
        "A CPU-only .venv takes about 1300 MB, one with CUDA about 5000 MB. Make room and run the"
        " same command again.".format(
            free_megabytes(ROOT), free_megabytes(tempfile.gettempdir()), tempfile.gettempdir()
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
