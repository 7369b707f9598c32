"""The pictures of the report page and of the studio, in both languages: docs/report.png, report.zh.png, studio.png, studio.zh.png.

    python benchmarks/pictures.py [--into docs]

Needs chromium with a Chinese font (apt-get install chromium fonts-noto-cjk), the `studio` extra and Playwright.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"
PROGRAM = [sys.executable, "-m", "mindspeed_dryrun"]
LANGUAGES = {"en": "", "zh": ".zh"}  # and what the name of the picture ends with
WIDTH, REPORT_HEIGHT, STUDIO_HEIGHT = 1180, 1090, 900


def reports(home: Path) -> dict[str, Path]:
    """One record, its page in each language."""
    subprocess.run(
        [*PROGRAM, "launch", str(EXAMPLE), "--explain", "--trainer", "embedded", "--out", "record"], cwd=home, check=True
    )
    pages = {}
    for language in LANGUAGES:
        done = subprocess.run(
            [*PROGRAM, "report", "record", "--format", "html", "--lang", language], cwd=home, check=True, capture_output=True
        )
        pages[language] = home / f"report.{language}.html"
        pages[language].write_bytes(done.stdout)
    return pages


@contextmanager
def studio(home: Path) -> Iterator[str]:
    """The address of a studio that runs as long as it is looked at."""
    command = [*PROGRAM, "studio", str(EXAMPLE), "--no-browser", "--trainer", "embedded", "--out", str(home / "studio")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        yield re.findall(r"http://\S+", process.stderr.readline())[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def take(browser: Any, address: str, into: Path, height: int, press: str = "") -> None:
    """One picture of the upper part of a page; `press` names the button of the language."""
    page = browser.new_page(viewport={"width": WIDTH, "height": height})
    page.set_default_timeout(300_000)
    page.goto(address)
    if press:
        finished = "() => document.querySelector('#result').dataset.state === 'done'"
        page.wait_for_function(finished)
        page.get_by_role("button", name=press).click()
        page.wait_for_timeout(2000)
        page.wait_for_function(finished)
    page.screenshot(path=into)
    page.close()
    print(into)


def main() -> int:
    """Takes the four pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "docs")
    into = parser.parse_args().into.absolute()
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        for language, page in reports(Path(folder)).items():
            take(browser, page.as_uri(), into / f"report{LANGUAGES[language]}.png", REPORT_HEIGHT)
        with studio(Path(folder)) as address:
            for language, button in (("en", "English"), ("zh", "中文")):
                take(browser, address, into / f"studio{LANGUAGES[language]}.png", STUDIO_HEIGHT, button)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
