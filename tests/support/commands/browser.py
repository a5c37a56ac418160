"""Drive a headless Chromium by the DevTools protocol through a pipe, so that pages are measured as users see them."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE = 120.0
"""Seconds to wait for any answer: a busy machine starts a browser slowly."""


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome that starts; None if there is none."""
    installed = (path for name in NAMES if (path := shutil.which(name)))
    return next((path for path in installed if _starts(path)), None)


def _starts(path: str) -> bool:
    """Return whether it is a browser, and not a package that says where to get one."""
    return subprocess.run([path, "--version"], capture_output=True, timeout=_PATIENCE).returncode == 0


class Browser:
    """One page in a running browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, page: Path | str, *, width: int, dark: bool = False, media: str = "screen") -> None:
        """Load a file, or a page at an address, into a window of this width in CSS pixels; a narrow window is a phone's."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, as JSON.

        Raises:
            AssertionError: It throws.
        """
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of a JavaScript expression once it is true, also after the page has led to another."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):  # of a page that is being left
                if found := self.evaluate(expression):
                    return found
            time.sleep(0.05)
        raise TimeoutError(f"{expression} did not become true within {_PATIENCE:.0f} s; the page: {self.text()[:2000]}")

    def text(self) -> str:
        """Return the text of the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def click(self, selector: str) -> None:
        """Click in the middle of an element, with the mouse."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.wait_for(f"!!{find}")
        box = self.evaluate(
            f"(() => {{ {find}.scrollIntoView({{block: 'center'}}); const b = {find}.getBoundingClientRect();"
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def write(self, selector: str, text: str) -> None:
        """Type a text into a field, in place of what is in it."""
        self.wait_for(f"!!document.querySelector({json.dumps(selector)})")
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key, such as ``Tab``."""
        for kind in ("keyDown", "keyUp"):
            codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def tree(self) -> list[tuple[str, str]]:
        """Return role and name of everything in the page, as a screen reader gets them."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], str(node.get("name", {}).get("value", ""))) for node in nodes if not node["ignored"]
        ]

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG for visual inspection."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ask the browser to end."""
        with contextlib.suppress(OSError):
            self._session = None
            self._send("Browser.close")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, **params)
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    def _send(self, method: str, **params: Any) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._commands, rest) :]
        return self._number

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser did not answer within {_PATIENCE:.0f} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise ConnectionError("the browser ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def running_browser(executable: str, folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile and its log in a folder, and end it with all its processes."""
    flags = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    # Root and many containers cannot use its sandbox; the pages are the tests' own.
    flags += ["--no-sandbox", f"--user-data-dir={folder / 'profile'}"]
    pipes = [*os.pipe(), *os.pipe()]
    # Above the numbers 3 and 4, at which the browser expects them.
    theirs_in, ours_out, ours_in, theirs_out = (fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in pipes)
    for pipe in pipes:
        os.close(pipe)
    log = os.open(folder / "browser.log", os.O_WRONLY | os.O_CREAT, 0o644)
    actions = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
    actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    environment = {**os.environ, "HOME": str(folder)}  # it keeps its caches there
    pid = os.posix_spawn(executable, [executable, *flags], environment, file_actions=actions, setpgroup=0)
    for descriptor in (theirs_in, theirs_out, log):
        os.close(descriptor)
    try:
        browser = Browser(ours_out, ours_in)
        yield browser
        browser.close()
    finally:
        os.close(ours_out)
        _end(pid)
        os.close(ours_in)


def _end(pid: int) -> None:
    """Wait for the browser to end by itself, then kill what is left of its group of processes."""
    end = time.monotonic() + 5
    ended = False
    while not ended and time.monotonic() < end:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
