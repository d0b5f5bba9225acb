"""Files in a folder that several processes use at the same time."""

import os
import shutil
import time
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write the file in one step: whoever finds it finds all of it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def remove(folder: Path | str) -> None:
    """Remove a folder in which a rank that has just begun may still be making files."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.01)
