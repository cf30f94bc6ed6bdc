"""Headless Chromium, spoken to through its debugging pipe: no library, no port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


def find_chromium() -> str | None:
    """The program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser. Everything that it says is kept in `events`."""

    def __init__(self, to: int, source: int) -> None:
        self._to, self._source, self._buffer, self._number = to, source, b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self.session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                return dict(heard["result"])

    def open(self, url: str, width: int) -> None:
        """Load a page in a window of some pixels' width, and wait until it is there."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", metrics)
        self.events.clear()
        self.call("Page.navigate", {"url": url})
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._hear()

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})["result"].get("value")

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._source, 1 << 16)
            assert more, "the browser has gone"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        heard: dict[str, Any] = json.loads(text)
        if "method" in heard:
            self.events.append(heard)
        return heard


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser that ends with the context."""
    ours, to = os.pipe()
    source, theirs = os.pipe()
    with tempfile.TemporaryDirectory(prefix="lmoffload-browser-", ignore_cleanup_errors=True) as home:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={home}")
        script = f'exec 3<&{ours} 4>&{theirs}; exec "$@"'
        child = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *options, "--remote-debugging-pipe"],
            pass_fds=(ours, theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"HOME": home},
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        try:
            yield Browser(to, source)
        finally:
            os.close(to)
            os.close(source)
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            time.sleep(0.2)  # its own children are still writing into its home
