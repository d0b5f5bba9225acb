"""A browser and a JupyterLab for the tests of this folder, which leave neither running.

CHROMIUM=/path/to/chromium chooses the browser; SCREENSHOTS=folder keeps what was seen, which a
failed test keeps in any case.
"""

import os
import shutil
from pathlib import Path

import pytest
from jupyterlab import NotebookPage, jupyterlab, marked_environment, marked_processes
from playwright.sync_api import sync_playwright
from processes import wait_for

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def chromium():
    """The path of Chromium or Chrome. Without one the tests are skipped; in CI they fail."""
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else BROWSERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        message = (
            f"no browser here: looked for {', '.join(names)}. Install Chromium (Debian: apt"
            " install chromium), or name yours: make browser-test CHROMIUM=/path/to/it"
        )
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    return found


@pytest.fixture(scope="session")
def server(chromium, tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("lab")) as address:
        yield address


@pytest.fixture(scope="session")
def browser(chromium, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, env=marked_environment(folder)
        )
        yield browser
        browser.close()
    assert wait_for(lambda: not marked_processes(folder)), "the browser is still running"


@pytest.fixture
def open_notebook(browser, server, request, tmp_path):
    """``open_notebook(path)`` shows a notebook of the course in a fresh browser window."""
    opened = []

    def open_it(path):
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        context.set_default_timeout(20_000)
        notebook = NotebookPage(context.new_page(), server)
        opened.append(notebook)
        notebook.open(path)
        return notebook

    yield open_it
    folder = os.environ.get("SCREENSHOTS")
    for notebook in opened:
        if folder or request.node.stash.get(FAILED, True):
            keep(notebook, Path(folder or tmp_path) / request.node.name.replace("/", "-"))
        notebook.page.context.close()


def keep(notebook, folder):
    folder.mkdir(parents=True, exist_ok=True)
    screenshots = notebook.screenshots | {"page.png": notebook.page.screenshot()}
    for name, png in screenshots.items():
        (folder / name).write_bytes(png)
    print(f"what was seen lies in {folder}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report
