"""Drive a headless Chromium through a pair of pipes, for tests that open pages."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_CHROMIUM = "no chromium on this machine (Debian's package chromium)"

_READY_S = 60

# The browser reads from descriptor 3 and writes to 4, whatever the pipes are called here.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 20) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless Chromium that is spoken to through a pair of pipes."""

    def __init__(self, profile: Path) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        command = [
            sys.executable, "-c", _START, str(theirs_in), str(theirs_out), str(CHROMIUM),
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        try:
            target = self.ask("Target.createTarget", url="about:blank")["targetId"]
            found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
            self.session = found["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self.process.kill()
            self.process.wait(timeout=30)
            raise

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _READY_S
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._in], [], [], left)[0]:
                part = os.read(self._in, 1 << 16)
                assert part, "the browser is gone"
                self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def open(self, path: Path, *, width: int, dark: bool) -> None:
        self.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return found["result"]["value"]

    def picture(self, clip: dict[str, float]) -> np.ndarray:
        found = self.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True,
            clip={**clip, "scale": 1},
        )  # fmt: skip
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB"))

    def close(self) -> None:
        try:
            self.session = None
            self.ask("Browser.close")
        except (AssertionError, OSError):
            self.process.kill()
        self.process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)
