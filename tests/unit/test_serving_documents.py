"""Every snippet of docs/quickstart.md and docs/integration.md works."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import flashinfer

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART, INTEGRATION = ROOT / "docs/quickstart.md", ROOT / "docs/integration.md"


def snippets(path: Path, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), flags=re.S | re.M)
    return [text for name, text in fences if name == language]


def execute(path: Path) -> dict:
    names: dict = {}
    gpu = torch.cuda.is_available()
    with contextlib.nullcontext() if gpu else flashinfer.reference_backend():
        for number, snippet in enumerate(snippets(path, "python")):
            exec(compile(snippet, f"{path.name}, snippet {number}", "exec"), names)
    return names


def test_every_snippet_is_found():
    """Each fence opens a block that is run here, but for the command that builds a preset."""
    for path, blocks in ((QUICKSTART, 6), (INTEGRATION, 10)):
        found = snippets(path, "python") + snippets(path, "bash") + snippets(path, "")
        assert 2 * len(found) == path.read_text().count("```") == 2 * blocks


def test_quickstart_in_python(capsys: pytest.CaptureFixture):
    names = execute(QUICKSTART)
    x = names["x"].float()
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(names["y"].float(), expected, rtol=0.01, atol=0.01)
    assert "weight" in capsys.readouterr().out, "the refusal names the argument"
    assert not names["engine"].has_work and set(names["answers"]) == {"a", "b"}
    stats = names["engine"].stats()
    assert stats["pages_free"] == stats["pages_total"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=["generate", "bench", "serve"])
def test_quickstart_in_a_shell(number: int):
    snippet = snippets(QUICKSTART, "bash")[number]
    if "curl" in snippet:
        if not shutil.which("curl"):
            pytest.skip("needs curl")
        pytest.importorskip("uvicorn", reason='the server needs pip install -e ".[serve]"')
        with socket.create_server(("127.0.0.1", 0)) as free:
            snippet = snippet.replace("8000", str(free.getsockname()[1]))
    snippet = re.sub(r"^python ", f"{sys.executable} ", snippet, flags=re.M)
    result = subprocess.run(
        ["bash", "-euc", snippet], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    if number == 1:
        columns = result.stdout.partition("\n---")[0].splitlines()[-1].split()
        assert columns == ["constant", "uniform", "skewed", "sharegpt"]
        assert re.search(r"^finished +4 +4 +4 +4$", result.stdout, flags=re.M)
    if number == 2:
        assert '"completion_tokens":4' in result.stdout and "data: [DONE]" in result.stdout


def attention(q, k, v, lengths):
    """Attention of the last token of each request, in double precision."""
    rows = []
    for row, (keys, values, length) in enumerate(zip(k, v, lengths, strict=True)):
        group = q.shape[1] // keys.shape[1]
        keys = keys[:length].double().repeat_interleave(group, 1)
        values = values[:length].double().repeat_interleave(group, 1)
        logits = torch.einsum("hd,nhd->hn", q[row].double(), keys) / q.shape[2] ** 0.5
        rows.append(torch.einsum("hn,nhd->hd", logits.softmax(-1), values))
    return torch.stack(rows)


def test_integration():
    names = execute(INTEGRATION)
    cache, pages, lengths = names["cache"], names["pages"], names["lengths"]
    gathered = [cache[:, own].transpose(1, 2).flatten(2, 3) for own in pages]  # [layer, 2, token]
    k, v = ([g[0, i] for g in gathered] for i in range(2))
    expected = attention(names["q"], k, v, lengths)
    torch.testing.assert_close(names["decoded"].double(), expected, rtol=0.02, atol=0.02)
    # The last layer's queries of the step with the prompts; `layer` has rotated them in place.
    k, v = ([g[1, i] for g in gathered] for i in range(2))
    last = [19, 22, 23]
    queries = names["qkv"][last, : names["heads"]]
    expected = attention(queries, k, v, lengths)
    torch.testing.assert_close(names["out"][last].double(), expected, rtol=0.02, atol=0.02)
    # The cache has every new token's value, and nothing else.
    filled = torch.cat([g[1, 1, :n] for g, n in zip(gathered, lengths, strict=True)])
    new = torch.cat([filled[:23], filled[-1:]])
    assert torch.equal(new, names["qkv"][:, names["heads"] + names["kv_heads"] :])
    assert not filled[23:-1].any()
    assert names["tokens"][2] == names["logits"][2].argmax()


def test_the_command_that_warms_up(monkeypatch: pytest.MonkeyPatch):
    """All of it but the compiler: minutes of two cores."""
    from flashinfer.cli import main, modules

    (block,) = snippets(INTEGRATION, "")
    specs, asked = [], []
    find = modules.find_specs

    def record(names):
        specs.extend(find(names))
        return specs

    monkeypatch.setattr(modules, "find_specs", record)
    monkeypatch.setattr(modules, "build_jit_specs", lambda missing, **_: asked.extend(missing))
    result = CliRunner().invoke(main, shlex.split(block)[1:])
    assert result.exit_code == 0, result.output
    families = {spec.name.split("_")[0] for spec in specs}
    assert {"attention", "norm", "page", "rope"} <= families
    assert set(map(id, asked)) <= set(map(id, specs))
    assert f"{len(asked)} modules to build" in result.output
