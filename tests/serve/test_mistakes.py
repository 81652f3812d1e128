"""Broken folders and wrong options: each is one line that names what is wrong."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import flashinfer
from examples.serve.__main__ import main
from examples.serve.checkpoint import load, write_random_checkpoint
from examples.serve.mistakes import bind, lacking, reported
from flashinfer.jit.errors import BuildError
from tests.serve.test_checkpoint import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_checkpoint(tmp_path / "model", TINY)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", '{"architectures":', "config.json must be JSON: "),
        ("config.json", "[1]", "config.json must be a JSON object, got list"),
        ("generation_config.json", "\x00", "generation_config.json must be JSON: "),
        ("byte_level.json", '{"eos": 3}', "byte_level.json must be"),
        ("model.safetensors", "junk", "model.safetensors must be a safetensors file: "),
        ("tokenizer.json", '{"x": 1}', "tokenizer.json must be a tokenizer: "),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str, message: str):
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers")
        (folder / "byte_level.json").unlink()
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(folder, "cpu")
    result = CliRunner().invoke(
        main, ["generate", "--device", "cpu", "--model", str(folder), "hello"]
    )
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_devices(device: str):
    with pytest.raises(ValueError, match=f"`device` must be .*got '{device}'"):
        load(None, device)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="one of the 0 GPUs that torch .* sees, got 'cuda'"):
        load(None, "cuda")


@pytest.mark.parametrize("command", ["generate", "bench", "serve"])
def test_too_many_pages(command: str):
    options = ["x"] if command == "generate" else ["--port", "0"] if command == "serve" else []
    result = CliRunner().invoke(
        main, [command, "--device", "cpu", "--num-pages", str(10**10), *options]
    )
    assert result.exit_code == 1 and "Error: out of memory" in result.stderr


def test_what_the_machine_lacks():
    for error in (BuildError("no nvcc"), torch.OutOfMemoryError("CUDA out of memory.\nmore")):
        with pytest.raises(click.ClickException, match=r"no nvcc|CUDA out of memory\.$"), lacking():
            raise error
    # A bug keeps its traceback.
    with pytest.raises(RuntimeError, match="a bug"), reported():
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--json", "/nowhere/x.json"], "`--json` must be a file in a folder that exists"),
        (["--plot", "/tmp"], "`--plot` must be a file"),
        (["--plot", "x.xyz"], "`--plot` must end with one of"),
    ],
)
def test_results_that_could_not_be_written(options: list[str], message: str):
    """Before anything is measured."""
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(main, ["bench", "--device", "cpu", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_bench_says_why_requests_were_refused(folder: Path):
    options = "bench --device cpu --requests 2 --lengths constant --output-tokens 2"
    result = CliRunner().invoke(main, [*options.split(), "--model", str(folder)])
    assert result.exit_code == 0
    reason = "constant: 2 requests were refused, the first: refused: too long: 1024 tokens"
    assert reason in result.stdout


def test_addresses():
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"`--host` 127.0.0.1 `--port` {port}: Address"):
            bind("127.0.0.1", port)
        pytest.importorskip("uvicorn")
        # Known before the model is loaded.
        result = CliRunner().invoke(main, ["serve", "--port", str(port), "--model", "/nowhere"])
        assert result.exit_code == 2 and f"`--port` {port}: Address" in result.stderr
    with pytest.raises(ValueError, match="cannot serve on `--host` nowhere.invalid"):
        bind("nowhere.invalid", 80)


def test_serve(folder: Path):
    """The command: a free port, an answer, an end by Ctrl-C without a traceback."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    command = "-m examples.serve serve --device cpu --port 0 --max-batch-size 3000 --num-pages 64"
    server = subprocess.Popen(
        [sys.executable, "-u", *command.split(), "--model", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert server.stdout is not None
        log = ""
        for line in server.stdout:
            if line.startswith("Serving"):
                break
            log += line
        assert f"FlashInfer {flashinfer.__version__}" in log and "Model 'model': Llama" in log
        assert "Context: 64 tokens\n" in log
        assert "64 pages of 16 tokens, 1,024 tokens in all" in log and "speculation 0" in log
        assert line.startswith("Serving 'model' on http://127.0.0.1:")
        url = line.split()[-1]
        body = {"model": "model", "prompt": "x", "max_tokens": 2, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request) as response:
                    assert json.load(response)["usage"]["completion_tokens"] == 2
                break
            except ConnectionError:  # bound, and not yet listening
                pass
            except urllib.error.URLError as error:
                assert isinstance(error.reason, ConnectionError), error
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.send_signal(signal.SIGINT)
        output = server.communicate(timeout=60)[0]
        assert "Traceback" not in output and server.returncode == 0, output
    finally:
        server.kill()
        server.wait()


def test_the_name_of_the_model():
    pytest.importorskip("starlette")
    from tests.serve.fake_engine import FakeEngine
    from tests.serve.test_server import running

    engine = FakeEngine()
    with running(engine) as site:
        status, answer = site.ask("/v1/completions", {"model": "gpt", "prompt": "x"})
        assert (status, answer["error"]["param"]) == (404, "model") and not engine.seen
        assert "'fake'" in answer["error"]["message"] and "'gpt'" in answer["error"]["message"]
