"""A headless Chromium over chromedriver's HTTP interface (https://www.w3.org/TR/webdriver2), no client library."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import held_port

__all__ = ["Browser", "open_browser", "why_not"]


def why_not() -> str | None:
    """What is missing for tests in a browser; None where nothing is."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"not installed: {', '.join(missing)} (Debian: apt-get install chromium chromium-driver)" if missing else None
    )


class Browser:
    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The value that chromedriver answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """What the body of a function returns, run in the page."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def console(self) -> list[str]:
        """Errors and warnings since the last call."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))


@contextmanager
def open_browser() -> Iterator[Browser]:
    holder = held_port()
    port = holder.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
    root = Browser(f"http://127.0.0.1:{port}")
    try:
        for _ in range(300):
            try:
                root.ask("GET", "/status")
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
        options = {"args": arguments, "binary": shutil.which("chromium")}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = root.ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]
        browser = Browser(f"http://127.0.0.1:{port}/session/{session}")
        try:
            yield browser
        finally:
            browser.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        holder.close()
