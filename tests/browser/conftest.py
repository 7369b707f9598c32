"""What the browser tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from npm_packages import npm_package

AXE = "axe-core@4.10.3"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, or another build of it, driven by Playwright, whose event loop must not outlive the module."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next((path for name in names if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def axe(request: pytest.FixtureRequest) -> str:
    """axe-core's script: $AXE_CORE, or fetched once from the npm registry into pytest's cache."""
    given = os.environ.get("AXE_CORE")
    if given:
        return Path(given).read_text(encoding="utf-8")
    return (npm_package(request.config, AXE) / "axe.min.js").read_text(encoding="utf-8")
