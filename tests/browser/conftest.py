"""What the browser tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    folder = Path(str(request.config.cache.mkdir("axe")))
    script = folder / f"{AXE}.js"
    if not script.exists():
        if not shutil.which("npm"):
            pytest.skip("axe-core is not here: npm is not installed (or set AXE_CORE to axe.min.js)")
        done = subprocess.run(["npm", "pack", AXE, "--silent"], cwd=folder, capture_output=True, text=True, check=False)
        packed = next(folder.glob("axe-core-*.tgz"), None)
        if done.returncode or packed is None:
            pytest.skip(f"axe-core could not be fetched: {done.stderr.strip()[:200]}")
        with tarfile.open(packed) as archive:
            member = archive.extractfile("package/axe.min.js")
            assert member is not None
            script.write_bytes(member.read())
    return script.read_text(encoding="utf-8")
