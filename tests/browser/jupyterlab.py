"""JupyterLab, started as `make lab` does, and a notebook in it as a learner sees it."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from playwright.sync_api import Locator, Page, expect
from processes import is_alive, wait_for

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 60
OPENED, ALL_RUN = 30_000, 100_000  # milliseconds until a notebook is
# Handed on from process to process: it tells what belongs to this test, whoever its parent is now.
MARK = "DDP_TEACH_BROWSER_TEST"

# What the page shows of each code cell.
CODE_CELLS = """() => [...document.querySelectorAll(".jp-Notebook .jp-CodeCell")].map(cell => ({
    prompt: cell.querySelector(".jp-InputPrompt").textContent,
    text: [...cell.querySelectorAll(".jp-OutputArea-output")].map(e => e.textContent).join("\\n"),
    pictures: cell.querySelectorAll(".jp-OutputArea-output img").length,
}))"""

ALL_RAN_OR_ONE_FAILED = """() =>
    [...document.querySelectorAll(".jp-Notebook .jp-CodeCell .jp-InputPrompt")]
        .every(prompt => /^\\[\\d+\\]:$/.test(prompt.textContent))
    || document.querySelector(".jp-Notebook [data-mime-type='application/vnd.jupyter.error']")"""

# An SVG is shown as an image whose address holds all of it; in HTML it stands as it is.
SHOWN = ".jp-Notebook .jp-OutputArea-output :is(img, svg[role=img])"
PICTURES = f"""() => [...document.querySelectorAll("{SHOWN}")].map(shown => {{
    const text = shown.src && decodeURIComponent(shown.src.replace("data:image/svg+xml,", ""));
    const svg = text ? new DOMParser().parseFromString(text, "image/svg+xml").firstChild : shown;
    const width = text ? shown.naturalWidth : shown.getBoundingClientRect().width;
    return {{alt: svg.getAttribute("aria-label"), width}};
}})"""
TEXT_OF_HTML = "html => new DOMParser().parseFromString(html, 'text/html').body.textContent"


# The server.


def marked_environment(folder: Path) -> dict[str, str]:
    """This process's environment as a learner's shell has it, with the mark of this test."""
    # ipykernel no longer takes up what child processes print when it finds itself under pytest
    others = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return others | {MARK: str(folder)}


def marked_processes(folder: Path) -> list[psutil.Process]:
    """Every living process that was started, at first or second hand, with that environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and is_alive(process.pid):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab that keeps its settings in ``folder``; ends with the block.

    It never saves: the notebooks that it shows are the ones in the repository.
    """
    docmanager = folder / "config/lab/user-settings/@jupyterlab/docmanager-extension"
    docmanager.mkdir(parents=True)
    (docmanager / "plugin.jupyterlab-settings").write_text('{"autosave": false}')
    kinds = ("config", "data", "runtime")
    folders = [f"JUPYTER_{kind.upper()}_DIR={folder / kind}" for kind in kinds]
    arguments = f"LAB_ARGS=--no-browser --port={free_port()} --ServerApp.port_retries=0"
    with (folder / "log").open("w") as log:
        make = subprocess.Popen(
            ["make", "lab", arguments, *folders],
            cwd=ROOT,
            env=marked_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield address(make, folder)
    finally:
        end(make, folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address(make: subprocess.Popen, folder: Path) -> str:
    """Wait until the server answers; then "http://127.0.0.1:PORT/?token=..."."""

    def server() -> dict | None:
        for path in (folder / "runtime").glob("jpserver-*.json"):
            return json.loads(path.read_text())
        return None

    ready = wait_for(lambda: server() or make.poll() is not None, SECONDS_TO_START)
    if not ready or make.poll() is not None:
        raise RuntimeError(f"`make lab` did not start:\n{(folder / 'log').read_text()}")
    return f"{server()['url']}?token={server()['token']}"


def end(make: subprocess.Popen, folder: Path) -> None:
    """Stop the server as a closed terminal does, and see that it leaves nothing behind."""
    os.killpg(make.pid, signal.SIGTERM)
    make.wait()
    gone = wait_for(lambda: not marked_processes(folder), 20)
    for process in marked_processes(folder):
        process.kill()
    assert gone, f"JupyterLab left something running:\n{(folder / 'log').read_text()}"


# The page.


def n_code_cells(path: Path) -> int:
    cells = nbformat.read(path, as_version=4).cells
    return sum(cell.cell_type == "code" for cell in cells)


class NotebookPage:
    """A notebook opened in JupyterLab. ``complaints`` collects what the browser complains about,
    and ``screenshots`` what pictures were looked at, by name."""

    def __init__(self, page: Page, server: str):
        self.page, self.server = page, server
        self.complaints: list[str] = []
        self.screenshots: dict[str, bytes] = {}
        page.on("console", self.on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfailed", lambda r: self.complaints.append(f"{r.failure}: {r.url}"))
        page.on("response", self.on_response)

    def open(self, path: Path) -> None:
        """Show a notebook of the repository, and nothing that was open before."""
        base, token = self.server.split("?")
        name = path.relative_to(ROOT).as_posix()
        self.page.goto(f"{base}lab/tree/{name}?reset&{token}")
        # Cells come one after the other, those out of sight when there is time.
        cells = self.page.locator(".jp-Notebook .jp-CodeCell")
        expect(cells).to_have_count(n_code_cells(path), timeout=OPENED)
        self.wait_until_idle()

    def on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console {message.type}: {message.text}")

    def on_response(self, response: Any) -> None:
        if response.status >= 400:
            self.complaints.append(f"status {response.status}: {response.url}")

    def wait_until_idle(self) -> None:
        indicator = self.page.locator(".jp-NotebookPanel .jp-Notebook-ExecutionIndicator")
        expect(indicator).to_have_attribute("data-status", "idle", timeout=OPENED)

    def choose(self, *labels: str) -> None:
        """Click through the menus: ``choose("Run", "Run All Cells")``."""
        bar, *entries = [self.page.get_by_text(label, exact=True) for label in labels]
        bar.and_(self.page.locator(".lm-MenuBar-itemLabel")).click()
        for entry in entries:
            entry.and_(self.page.locator(".lm-Menu-itemLabel")).click()

    def code_cells(self) -> list[dict]:
        """``prompt``, ``text`` and the number of ``pictures`` of every code cell, as shown."""
        return self.page.evaluate(CODE_CELLS)

    def run_all(self) -> None:
        """Clear the stored outputs, run all cells, and wait for the last one."""
        self.choose("Edit", "Clear Outputs of All Cells")
        assert {(c["prompt"], c["text"]) for c in self.code_cells()} == {("[ ]:", "")}
        self.choose("Run", "Run All Cells")
        self.page.wait_for_function(ALL_RAN_OR_ONE_FAILED, timeout=ALL_RUN)
        self.wait_until_idle()

    def text_of_html(self, html: str) -> str:
        """What is to be read where the page shows this HTML."""
        return self.page.evaluate(TEXT_OF_HTML, html)

    def write(self, index: int, source: str) -> None:
        """Replace what stands in a code cell, by keyboard."""
        self.page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(index).click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(source)

    def pictures(self) -> list[dict]:
        """``alt`` and ``width`` in pixels, 0 where it can't be shown, of every picture shown."""
        return self.page.evaluate(PICTURES)

    def look_at_pictures(self, theme: str) -> list[bytes]:
        """Switch to ``theme``, "Light" or "Dark"; a PNG of every picture as it then looks."""
        self.choose("Settings", "Theme", f"JupyterLab {theme}")
        light = "true" if theme == "Light" else "false"
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        self.page.wait_for_load_state("networkidle")  # the theme's style sheet
        images = self.page.locator(SHOWN).all()
        seen = [standing_still(image) for image in images]
        self.screenshots |= {f"{theme.lower()}-{i}.png": png for i, png in enumerate(seen)}
        return seen


def standing_still(image: Locator) -> bytes:
    """A PNG of ``image``, taken when the page no longer moves: cells far from what is seen get
    their heights late."""
    before, now = None, image.screenshot()
    until = time.monotonic() + 20
    while now != before and time.monotonic() < until:
        before, now = now, image.screenshot()
    return now
