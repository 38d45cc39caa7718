"""Headless Chromium by its debugging pipe: enough to open a page, run a line of script in it and take its picture."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. Use as a context."""

    def __init__(self, width: int = 1280, height: int = 1700, dark: bool = False) -> None:
        assert CHROMIUM is not None, "no Chromium here"
        self._profile = tempfile.mkdtemp(prefix="page-")
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        self._size = (width, height)
        self._dark = dark
        self._rest = b""
        self._number = 0
        self.errors: list[str] = []

        def place() -> None:
            theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (from_us, to_us)]
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
            + [f"--user-data-dir={self._profile}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = ""
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._call("Runtime.enable")
        self._call("Page.enable")
        self.resize(width, height)
        scheme = "dark" if dark else "light"
        self._call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size)

    def open(self, url: str) -> None:
        self._call("Page.navigate", {"url": url})

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        found = self._call("Runtime.evaluate", {"expression": script, "awaitPromise": True, "returnByValue": True})
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code})

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self._call("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"])[:500])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        frame, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(frame)
        return found
