"""The example server as a process of its own, and a client that costs little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.serve.checkpoint import SMALL, write_random_checkpoint

ROOT = Path(__file__).parents[2]


@dataclass
class ServerProcess:
    """A running server; `log` is what it writes."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    def memory(self) -> int:
        """Bytes that are resident."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()


@contextlib.contextmanager
def serving(
    log: Path, *flags: str, before: Callable[[], object] | None = None
) -> Iterator[ServerProcess]:
    """A server of a tiny random model on the CPU, until the block ends."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    folder = log.parent / "model"
    folder.mkdir()
    write_random_checkpoint(folder, {**SMALL, **shape})
    command = [sys.executable, "-u", "-m", "examples.serve", "serve", "--model", str(folder)]
    command += ["--device", "cpu"]
    # oneDNN keeps code for each number of rows that it has seen, up to so many.
    environment = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=ROOT,
            env=environment,
            preexec_fn=before,
        )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("Serving")), None)
        assert line is not None, log.read_text()
        port = int(line.rsplit(":", 1)[1].split("/")[0])
        _wait_until_it_listens(port)
        yield ServerProcess(process, port, log)
    finally:
        process.kill()
        process.wait()


def _wait_until_it_listens(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port}")


class Client:
    """A connection that is kept between requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of an answer; `body`: bytes, or what becomes JSON."""
        new = self._streams is None
        try:
            return await self._ask(path, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            # The server may close a connection between two requests.
            self.close()
            if new:
                raise
            return await self._ask(path, body)

    async def _ask(self, path: str, body: object) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        writer.write(request(path, body))
        head = await reader.readuntil(b"\r\n\r\n")
        names = dict(
            line.lower().split(b": ", 1)
            for line in head.strip().split(b"\r\n")[1:]
            if b": " in line
        )
        if b"content-length" in names:
            answer = await reader.readexactly(int(names[b"content-length"]))
        else:
            answer = await reader.readuntil(b"0\r\n\r\n")
        if names.get(b"connection") == b"close":
            self.close()
        return int(head.split()[1]), answer

    def close(self) -> None:
        """Leave."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request(path: str, body: object = None) -> bytes:
    """Body that a client sends; None: a GET."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
