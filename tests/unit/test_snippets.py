"""The snippets of the skills, README and pages that no other test runs, as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import flashinfer
import flashinfer.testing

ROOT = Path(__file__).resolve().parents[2]
SKILLS = ROOT / ".claude" / "skills"
ADD_KERNEL = SKILLS / "add-cuda-kernel" / "SKILL.md"


def snippets(path: Path, language: str) -> list[str]:
    """Blocks of a language; those of list items lose their indent."""
    fences = re.findall(rf"^( *)```{language}\n(.*?)^\1```", path.read_text(), re.S | re.M)
    return [textwrap.dedent(text) for _, text in fences]


# ---- The skill that adds an operation ----

CHECK = """
import pytest, torch
from flashinfer.jit.clip import ClipConfig, gen_clip_module
from flashinfer.norm.clip import clip

x = torch.tensor([[-3.0, -0.5, 0.0], [0.5, 3.0, float("nan")]])
expected = torch.tensor([[-1.0, -0.5, 0.0], [0.5, 1.0, float("nan")]])
assert torch.equal(clip(x, 1.0).nan_to_num(7), expected.nan_to_num(7))
assert clip(x, 1.0, out=x) is x and torch.equal(x.nan_to_num(7), expected.nan_to_num(7))
with pytest.raises(ValueError, match="out"):
    clip(x, 1.0, out=torch.empty(3))

module = gen_clip_module(ClipConfig(torch.float32)).build_and_load()
with pytest.raises(ValueError, match="`input` must be on a CUDA device|`input`.*CUDA"):
    module.clip(torch.empty_like(x), x, 1.0, None)
for arguments, error in (
    ((x, x, 0.0, None), ValueError),
    ((x, x, float("nan"), None), ValueError),
    ((x[:1], x, 1.0, None), ValueError),
    ((x[:, ::2], x[:, ::2], 1.0, None), ValueError),
    ((x.half(), x, 1.0, None), ValueError),
    ((x, x, 1.0, None, 3), TypeError),
):
    with pytest.raises(error):
        module.clip(*arguments)
"""


@pytest.mark.compiler
def test_the_operation_of_the_skill_builds_and_refuses(tmp_path: Path):
    """Its files are written to the paths in their first lines, into a copy of the package."""
    for name in ("csrc", "flashinfer", "include"):
        ignored = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "version.txt", tmp_path)
    written = set()
    for snippet in snippets(ADD_KERNEL, "(?:cpp|python)"):
        path = re.match(r"(?://|#) (\S+)\n", snippet)[1]
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(snippet)
        written.add(path)
    assert len(written) == 8
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_BACKEND": "reference",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ---- Snippets of Python that stand alone ----

CACHES = ("ckv_cache", "kpe_cache")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls that a snippet wants timed, which take 10 us each."""
    calls: list[tuple] = []

    def bench_gpu_time(function, input_args=(), **options):
        calls.append((function, function(*input_args), options))
        return [0.01] * 3

    monkeypatch.setattr(flashinfer.testing, "bench_gpu_time", bench_gpu_time)
    monkeypatch.setattr(flashinfer.testing, "copy_bandwidth_tb_per_sec", lambda: 4.0)
    return calls


def execute(text: str) -> dict:
    """Runs a snippet; on the CPU, where there is no GPU."""
    if torch.cuda.is_available():
        names: dict = {}
        exec(compile(text, "snippet", "exec"), names)
        return names
    with flashinfer.reference_backend():
        names = {}
        exec(compile(text.replace('"cuda"', '"cpu"'), "snippet", "exec"), names)
        return names


def test_the_skill_that_measures(measured: list[tuple], capsys: pytest.CaptureFixture):
    (snippet,) = snippets(SKILLS / "benchmark-kernel" / "SKILL.md", "python")
    execute(snippet)
    ((function, result, options),) = measured
    assert function is flashinfer.rmsnorm and result.shape == (1024, 8192)
    assert options == {"enable_cupti": True, "use_cuda_graph": True}
    assert re.fullmatch(r"10\.0 us \d+\.\d+ % of a copy\n", capsys.readouterr().out)


def test_the_skill_that_debugs():
    (snippet,) = snippets(SKILLS / "debug-cuda-crash" / "SKILL.md", "python")
    names = execute(snippet)
    x = names["x"].double()
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(names["expected"].double(), expected, rtol=1e-5, atol=1e-5)


def test_readme():
    (snippet,) = snippets(ROOT / "README.md", "python")
    names = execute(snippet)
    gate, up = names["gate_up"].float().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(names["z"].float(), expected, rtol=0.02, atol=0.02)
    assert names["y"].shape == names["x"].shape


def test_autotuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (snippet,) = snippets(ROOT / "docs" / "autotuning.md", "python")
    execute(snippet)


@pytest.mark.compiler
def test_latent_attention():
    snippet, _ = snippets(ROOT / "docs" / "mla.md", "python")
    names = execute(snippet)
    bounds = names["kv_indptr"].tolist()
    for request, length in enumerate(names["lengths"]):
        pages = slice(bounds[request], bounds[request + 1])
        ckv, kpe = (names[name][pages].flatten(0, 1)[:length].double() for name in CACHES)
        q_nope, q_pe = (names[name][request].double() for name in ("q_nope", "q_pe"))
        logits = (q_nope @ ckv.T + q_pe @ kpe.T) * 192**-0.5
        expected = logits.softmax(-1) @ ckv
        torch.testing.assert_close(names["out"][request].double(), expected, rtol=0.02, atol=0.02)


# ---- The macros for users' operations ----


def test_every_macro_for_users_is_listed():
    header = (ROOT / "csrc" / "tvm_ffi_utils.h").read_text()
    macros = set(re.findall(r"^#define ((?:CHECK|DISPATCH)_\w+)\(", header, re.M))
    listed = (ROOT / "examples" / "scale" / "README.md").read_text()
    named = set(re.findall(r"\b((?:CHECK|DISPATCH)_\w+)\b", listed))
    assert macros == named and len(macros) > 15
