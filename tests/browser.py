"""A headless Chromium, driven by its debugging protocol over two pipes: no package, no port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    # It asks no network for anything of its own.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-quic",
)


def find() -> str | None:
    """Path of a browser of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser; a context manager.

    Attributes
    ----------
    requested : list of str
        Addresses that pages asked for.
    complaints : list of str
        Exceptions of scripts, and what they and the browser wrote to the console as errors.
    """

    def __init__(self, path: str) -> None:
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._folder = tempfile.TemporaryDirectory()
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # The browser reads from 3 and writes to 4.
        redirect = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", path, *OPTIONS, "--remote-debugging-pipe"]
            + [f"--user-data-dir={self._folder.name}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._messages = os.fdopen(self._answers, "rb")
        self._buffer, self._count, self._session = b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)  # without its pipe the browser ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._messages.close()
        self._folder.cleanup()

    def open(self, address: str) -> None:
        """Go to an address and wait until it is loaded."""
        answer = self._call("Page.navigate", url=address)
        if "errorText" in answer:
            raise ValueError(f"{address}: {answer['errorText']}")
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited if it is a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise ValueError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20) -> bool:
        """Whether a JavaScript condition becomes true."""
        return self.evaluate(
            f"""new Promise(done => {{
                const end = Date.now() + {seconds * 1000};
                const look = () => ({condition}) ? done(true)
                    : Date.now() > end ? done(false) : setTimeout(look, 20);
                look();
            }})"""
        )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            pass
        if "error" in answer:
            raise ValueError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise ValueError(f"the browser ended with status {self._process.wait()}")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(details["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(details["exceptionDetails"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.complaints.append(details["entry"]["text"] + details["entry"].get("url", ""))
        elif event == "Runtime.consoleAPICalled" and details["type"] == "error":
            self.complaints.append(str(details["args"]))
