"""The server as a process: hostile clients, few open files, SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason='the server needs pip install -e ".[serve]"')

from tests.serve.server_process import Client, ServerProcess, request, serving
from tests.serve.soak import soak


def test_hostile_clients(tmp_path: Path):
    """The long form is `python -m tests.serve.soak`, which also compares latencies."""
    result = soak(150, tmp_path / "log")
    assert not result.faults, result.report()
    assert len(result.loaded) + result.hostile >= 150 and result.hostile > 20
    kinds = {name.split()[0] for name in result.statuses}
    assert kinds == {"fuzz", "leave", "half", "burst"}
    assert result.statuses["fuzz 400"] > 3


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


def test_few_files_and_sigterm(tmp_path: Path):
    flags = "--num-pages 256", "--shutdown-timeout 3"
    log = tmp_path / "log"
    with serving(log, *" ".join(flags).split(), before=_few_files) as server:
        assert "--max-connections" in log.read_text()
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            asyncio.run(_serves(server))
        assert log.stat().st_size < 100_000, "a client can fill the disk"
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            body = {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True}
            client.sendall(request("/v1/completions", body))
            answer = client.recv(1 << 16)
            server.process.send_signal(signal.SIGTERM)
            while piece := client.recv(1 << 16):
                answer += piece
        assert b"the server is shutting down" in answer or b'"length"' in answer
        assert b"data: [DONE]" in answer
        assert server.process.wait(60) == -signal.SIGTERM
    assert "Traceback" not in log.read_text()


async def _serves(server: ServerProcess) -> None:
    for _ in range(3):
        client = Client(server.port)
        status, _ = await client.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})
        client.close()
        assert status == 200
