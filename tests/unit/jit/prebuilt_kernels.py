"""A host part and cubins of one module, and a web server on loopback that serves a folder."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flashinfer.jit import binary, cubins_build, host_parts_build
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.core import JitSpec
from flashinfer.jit.cubin_manifest import file_name

NAME = "act_and_mul_activation_silu_dtype_bf16"
ARCHS = ("80", "90a")


def spec() -> JitSpec:
    return gen_act_and_mul_module("silu", torch.bfloat16)


def content() -> str:
    return spec().identity(with_toolchain=False).content


def make(folder: Path) -> None:
    """Fill ``host`` and ``cubins`` of a folder; nvcc stands for NVRTC, whose cubins are as good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder / "cache"))
        assert host_parts_build.build([spec()], folder / "host") == {}
        spec().build()
        entry = spec().find()
        assert entry is not None
        elves = binary.device_elfs(entry.library.read_bytes())
        made = {arch.removeprefix("sm_"): elf for arch, _, elf in elves}
        assert set(made) == set(ARCHS)
        for arch, cubin in made.items():
            path = folder / "cubins" / file_name(NAME, content(), arch)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(cubin)
        cubins_build.write_manifest(folder / "cubins")


class Requests(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, keeps count of requests, fails where a test says so."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        if self.path == "/truncated":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"short")
            return
        super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[http.server.ThreadingHTTPServer]:
    """A server on loopback; it has ``address``, ``paths`` that were asked for, and ``failures``."""
    handler = functools.partial(Requests, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.paths, server.failures = [], 0
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
