"""Run the parts of `make test`, or those named, and print how long each took.

run_tests.py [lint] [pytest] [nbval]
"""

import subprocess
import sys
import time

PYTEST = [sys.executable, "-m", "pytest"]
RUFF = [sys.executable, "-m", "ruff"]

PARTS = {
    "lint": [[*RUFF, "check", "."], [*RUFF, "format", "--check", "."]],
    # Two folders have targets of their own: make conformance, make browser-test
    "pytest": [[*PYTEST, "--ignore=tests/conformance", "--ignore=tests/browser"]],
    # The kernel is this interpreter, whatever kernels the user has installed under which names.
    # nbval limits each cell itself; a cell that fails under pytest's limit would say less.
    "nbval": [
        [*PYTEST, "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "--timeout=0"]
        + ["notebooks"]
    ],
}


def main(names: list[str]) -> int:
    """Run the parts named, all of them by default; 0 if everything passed."""
    unknown = set(names) - set(PARTS)
    if unknown:
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return 2
    lines = []
    failed = False
    for name in names or PARTS:
        print(f"\n== {name} ==", flush=True)
        start = time.monotonic()
        # Every command runs, so that one run shows all that is wrong.
        statuses = [subprocess.call(command) for command in PARTS[name]]
        seconds = time.monotonic() - start
        lines.append(f"{name:<8} {'FAILED' if any(statuses) else 'passed'} in {seconds:.1f} s")
        failed |= any(statuses)
    print("", *lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
