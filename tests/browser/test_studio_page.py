"""The studio in a real browser on the real engine: change, see, undo, compare, export; and what attackers get."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from mindspeed_dryrun.engines.packages import packages_folder

pytest.importorskip("starlette", reason="pip install 'mindspeed-dryrun[studio]'")
pytest.importorskip("uvicorn", reason="pip install 'mindspeed-dryrun[studio]'")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"
WAIT_MS = 120_000  # on a machine that does other things as well
pytestmark = [
    pytest.mark.browser,
    pytest.mark.engine,
    pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run"),
]


class Served:
    """A running studio."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "mindspeed_dryrun", "studio", str(EXAMPLE), "--no-browser", "--trainer", "embedded"]
        self.process = subprocess.Popen(
            [*command, "--out", str(folder)], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": _path()}
        )
        assert self.process.stderr
        self.address = re.findall(r"http://\S+", self.process.stderr.readline())[0]
        parts = urlparse(self.address)
        self.host, self.token = parts.netloc, parse_qs(parts.query)["token"][0]

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        sent = {"Host": self.host, "X-Studio-Token": self.token, "Content-Type": "application/json", **headers}
        connection.request(method, path, json.dumps(body) if body is not None else None, sent)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def processes(self) -> list[int]:
        """What runs in the studio's folder, or was told of it, beside the studio itself."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                seen = str(self.folder).encode() in (entry / "environ").read_bytes() or str(
                    (entry / "cwd").readlink()
                ).startswith(str(self.folder))
            except OSError:
                continue
            if seen:
                found.append(int(entry.name))
        return found

    def ranks(self) -> list[int]:
        """The ranks that run: children, in a rank's folder, of their guards."""
        mine, found = self.processes(), []
        for pid in mine:
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if Path(f"/proc/{pid}/cwd").readlink().name.isdigit() and parent in mine:
                    found.append(pid)
        return found

    def kill_ranks(self) -> bool:
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("studio") / "records")
    yield one
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(60) == 128 + signal.SIGINT
    assert eventually(lambda: not one.processes()), "closing it ends every process"


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(bypass_csp=True, viewport={"width": 1440, "height": 900}, accept_downloads=True)
    one = context.new_page()
    one.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    asked: list[str] = []
    one.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.on("request", lambda request: asked.append(request.url))
    yield one
    assert not [text for text in problems if "status of 4" not in text], problems
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in asked), "no request leaves the machine"
    context.close()


def done(page: Any, used: str | None = None) -> None:
    """Waits until the shown try is explained, and has this used peak."""
    page.wait_for_function(
        "() => document.querySelector('#result').dataset.state === 'done' || document.querySelector('#verdict.bad')"
    )
    if used:
        page.wait_for_function("(used) => document.querySelector('#used')?.textContent === used", arg=used)
        page.wait_for_function("() => document.querySelector('#result').dataset.state === 'done'")


def test_open_change_undo_compare_and_keep_the_address(served: Served, page: Any) -> None:
    page.goto(served.address)
    done(page, "55389M")
    assert page.inner_text("#peak") == "57257M" and page.get_attribute("#verdict", "data-verdict") == "fits"
    assert "s" in page.inner_text("#iteration") and page.locator("#curve").count() == 1
    assert page.locator(".bar").count() == 2
    page.select_option("#c-recompute", "full uniform 1")
    done(page, "37813M")
    kept = page.url
    page.click('[data-pin="1"]')
    page.wait_for_selector("#compare")
    assert "-17576M" in page.inner_text("#compare")
    assert page.locator("#plot circle").count() == 2
    page.click("#undo")
    done(page, "55389M")
    assert page.input_value("#c-recompute") == "none"
    page.goto("about:blank")
    page.goto(kept)
    done(page, "37813M")
    assert page.input_value("#c-recompute") == "full uniform 1"


def test_change_tp_apply_an_advice_undo_compare_and_run_the_exported_script(served: Served, page: Any, tmp_path: Path) -> None:
    page.goto(served.address)
    done(page, "55389M")
    page.select_option("#c-tp", "1")
    page.wait_for_selector("#verdict[data-verdict='does_not_fit']")
    done(page)
    page.wait_for_function("() => document.querySelector('#result').dataset.state === 'done'")
    wide = page.inner_text("#used")
    page.click("#levers li:first-child button")
    page.wait_for_function(
        "(before) => document.querySelector('#result').dataset.state === 'done' && document.querySelector('#used').textContent !== before",
        arg=wide,
    )
    advised = page.inner_text("#used")
    assert megabytes(advised) < megabytes(wide), "an advice saves memory"
    page.click("#undo")
    done(page, wide)
    assert page.input_value("#c-tp") == "1"
    page.click('[data-pin="1"]')
    page.wait_for_selector("#compare")
    assert f"+{megabytes(wide) - 55389}M" in page.inner_text("#compare")
    with page.expect_download() as download:
        page.click('[data-export="script"]')
    script = tmp_path / "exported.sh"
    download.value.save_as(script)
    command = [sys.executable, "-m", "mindspeed_dryrun", "launch", str(script), "--trainer", "embedded", "--json", "--no-cache"]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": _path()},
        check=False,
    )
    report = json.loads(ran.stdout)
    shown = megabytes(wide), megabytes(page.inner_text("#peak"))
    assert (report["used_peak_mb"], report["actual_peak_mb"]) == shown, ran.stderr
    for what, sign in (("sweep", '"variants"'), ("report", "<!DOCTYPE html>")):
        status, text = served.request("GET", f"/api/tries/1/export/{what}")
        assert status == 200 and sign in text


def megabytes(text: str) -> int:
    return int(text.removesuffix("M"))


def test_what_is_impossible_is_explained(served: Served, page: Any) -> None:
    page.goto(served.address)
    done(page, "55389M")
    assert page.locator("#c-tp option[value='4']").is_disabled()
    page.click(".field:has(#c-tp) summary")
    assert "not divisible" in page.inner_text(".field:has(#c-tp) .why")
    page.fill("#c-gbs", "63")
    page.press("#c-gbs", "Tab")
    page.fill("#c-layers", "1")
    page.press("#c-layers", "Tab")
    page.wait_for_selector("#problem:not([hidden])")
    assert page.inner_text("#used") == "55389M", "the last answer stays"
    page.click("#reset")
    page.wait_for_selector("#problem[hidden]", state="attached")


def test_a_killed_engine_is_reported_and_the_page_recovers(served: Served, page: Any) -> None:
    page.goto(served.address)
    done(page, "55389M")
    assert eventually(lambda: not served.ranks()), "what other tests asked for is done"
    page.fill("#c-layers", "280")  # ten times the layers: a rank that is seen is in the middle
    page.press("#c-layers", "Tab")
    assert eventually(lambda: served.kill_ranks() and page.locator("#verdict.bad").count() > 0), "every rank was killed"
    assert "killed" in page.inner_text("#result")
    page.fill("#c-layers", "4")
    page.press("#c-layers", "Tab")
    page.wait_for_function(
        "() => document.querySelector('#verdict.good') && document.querySelector('#result').dataset.state === 'done'"
    )


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("width", "height", "scheme"), [(1440, 900, "light"), (390, 844, "dark")])
def test_it_is_open_to_everyone(
    served: Served,
    page: Any,
    axe: str,
    tmp_path: Path,
    language: str,
    width: int,
    height: int,
    scheme: str,
) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    page.goto(served.address + f"&lang={language}")
    done(page, "55389M")
    page.add_script_tag(content=axe)
    found = page.evaluate("() => axe.run().then((result) => result.violations)")
    serious = [
        (item["id"], [node["html"] for node in item["nodes"]]) for item in found if item["impact"] in ("serious", "critical")
    ]
    assert not serious
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    assert page.get_attribute("html", "lang") == {"en": "en", "zh": "zh-CN"}[language]
    assert page.inner_text("#verdict strong") == {"en": "FITS", "zh": "放得下"}[language]


def test_the_keyboard_is_enough(served: Served, page: Any) -> None:
    page.goto(served.address)
    done(page, "55389M")
    page.focus("#c-do")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "c-sp"
    page.keyboard.press("Shift+Tab")
    page.focus("#c-recompute")
    page.keyboard.press("f")  # full uniform 1, chosen as it is typed: Enter would open the list, which keeps later keys to itself
    done(page, "37813M")
    assert page.evaluate("document.activeElement.id") == "c-recompute", "the focus stays where it was"
    page.keyboard.press("Control+z")
    done(page, "55389M")


def test_attacks_get_nothing(served: Served) -> None:
    good = {"flags": {"--micro-batch-size": "1"}}
    before = len(json.loads(served.request("GET", "/api/history")[1])["html"])
    refused = [
        served.request("POST", "/api/tries", good, **{"X-Studio-Token": "wrong"}),
        served.request("POST", "/api/tries", good, Origin="http://evil.example"),
        served.request("POST", "/api/tries", good, Host="evil.example"),
        served.request("POST", "/api/tries", good, **{"Sec-Fetch-Site": "cross-site"}),
        served.request("GET", "/?token=wrong", **{"X-Studio-Token": ""}),
        served.request("GET", "/api/events", **{"X-Studio-Token": ""}),
    ]
    assert [status for status, _ in refused] == [403] * len(refused)
    wrong = [
        {"flags": {"--micro-batch-size": "1; touch /tmp/owned"}},
        {"flags": {"--micro-batch-size": "9" * 40}},
        {"sets": {"TP": "$(touch /tmp/owned)"}},
        {"command": "sh"},
        "text",
    ]
    assert [served.request("POST", "/api/tries", body)[0] for body in wrong] == [422] * len(wrong)
    assert served.request("POST", "/api/tries", {"flags": {"--lr": "1" * 70000}})[0] in (403, 422)
    assert served.request("GET", "/static/..%2f..%2fcommands%2fstudio.py")[0] == 404
    assert len(json.loads(served.request("GET", "/api/history")[1])["html"]) == before and not Path("/tmp/owned").exists()


def test_a_thousand_requests_are_bounded(served: Served) -> None:
    statuses = []
    for number in range(1000):
        status, _ = served.request("POST", "/api/tries", {"flags": {"--seq-length": str(4096 + 2 * number)}})
        statuses.append(status)
    assert set(statuses) <= {200, 422, 429} and statuses.count(429) > 500
    assert statuses.count(200) < 400
    assert served.request("GET", "/api/history")[0] == 200
