"""Chromium without a window, driven by Playwright."""

import shutil
import time
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WEBGL = "--enable-unsafe-swiftshader"
"""Flag for pages that draw with WebGL, as MLflow's do, without a GPU."""


@contextmanager
def open_browser(*flags):
    """Open a browser; skip the test if there is none."""
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as program:
        browser = program.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        yield browser
        browser.close()


def wait(condition, seconds=60.0):
    """Return the value of `condition` once it is true; it asks a page, and runs its events."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the page did not get there in time"
        time.sleep(0.1)
    return found
