"""A headless Chromium over its debugging pipe: the little of the protocol that the tests need, standard library only."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any


def find() -> str | None:
    """Debian's chromium, or another build of it."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. `requests`, `console` and `dialogs` collect what the page does."""

    def __init__(self, binary: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run"
        flags += " --disable-background-networking --disable-component-update --remote-debugging-pipe"
        # The browser speaks on descriptors 3 and 4, and only a shell can place them there.
        command = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, binary, str(profile)],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come in between are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(60)
            if answer is None:
                raise TimeoutError(f"no answer to {method}")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._events.append(answer)

    def open(self, page: Path, width: int, height: int, scheme: str = "light") -> None:
        """Loads a file at this size and colour scheme, and waits until it has."""
        self._events.clear()
        mobile = width < 600
        self.call("Page.setBypassCSP", enabled=True)  # axe is put into the page by the test
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        self._wait("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is waited for)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "JavaScript error"))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> bytes:
        """The whole page as PNG."""
        data = base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        path.write_bytes(data)
        return data

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened."""
        found = [event for event in self._events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in found]

    @property
    def problems(self) -> list[str]:
        """Console messages, log entries, uncaught exceptions and dialogs."""
        names = (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        )
        return [json.dumps(event["params"]) for event in self._events if event.get("method") in names]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._session = None
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _wait(self, method: str) -> None:
        deadline = time.monotonic() + 60
        while not any(event.get("method") == method for event in self._events):
            event = self._receive(max(0.1, deadline - time.monotonic()))
            if event is None:
                raise TimeoutError(f"{method} did not come")
            self._events.append(event)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._read, 2**16)
            if not data:
                raise RuntimeError("chromium has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
