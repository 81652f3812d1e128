"""What mypy and pyright say of a user's script: they know every signature, return type and name.

The package lies in a folder of its own, found through a .pth file, as an editable install has it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each line that ends in a comment has one mistake, of the kind that the comment names.
SCRIPT = """
import torch
import flashinfer

x = w = torch.ones(4, 4096)
flashinfer.rmsnorm(x)  # missing argument
flashinfer.rmsnorm(x, w, epsilon=1e-5)  # no such name
flashinfer.rmsnorm(x, w, eps="a")  # wrong type
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(x, kv_layout=3)  # wrong type
wrapper.plan(x, x, x, 8, 8, 128)  # missing argument
wrapper.run(x, (x, x), q_scales=1.0)  # no such name
flashinfer.bmm_fp8(x, x, x, x, "bf16")  # wrong type

reveal_type(flashinfer.rmsnorm(x, w))
reveal_type(flashinfer.rmsnorm.fi_trace(input=x, weight=w))
reveal_type(wrapper.plan.fi_trace())
reveal_type(wrapper.run(x, (x, x)))
reveal_type(wrapper.run(x, (x, x), return_lse=True))
reveal_type(flashinfer.single_prefill_with_kv_cache(x, x, x, return_lse=True))
reveal_type(flashinfer.sampling.sampling_from_probs(x))
reveal_type(flashinfer.bmm_fp8.is_backend_supported("cublas", 90))
reveal_type(flashinfer.gemm.mm_bf16(x, x))
"""
REVEALED = [
    "Tensor",
    "dict[str, Any]",
    "dict[str, Any]",
    "Tensor",
    "tuple[Tensor, Tensor]",
    "tuple[Tensor, Tensor]",
    "Tensor",
    "bool",
    "Tensor",
]
FAULTY = {n for n, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(command: list[str], folder: Path) -> str:
    """Output of a checker in the script's folder; a rc of 1 means that it found mistakes."""
    env = os.environ | {"MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


def plain(text: str) -> str:
    """A type without the modules that mypy writes before its names."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)


def test_mypy_sees_mistakes_and_types(script: Path):
    pytest.importorskip("mypy", reason="needs mypy (extra dev)")
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", script.name]
    # The package's own lines are not read again for the user's mistakes.
    output = run([*command, "--follow-imports=silent", "--no-error-summary"], script.parent)
    found = {int(n) for n in re.findall(r"^script.py:(\d+): error:", output, flags=re.M)}
    assert found == FAULTY, output
    revealed = re.findall(r'Revealed type is "(.*)"', output)
    assert [plain(text) for text in revealed] == REVEALED


def test_pyright_sees_mistakes_and_types(script: Path):
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("needs basedpyright (extra dev)")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath"]
    report = json.loads(run([*command, sys.executable, script.name], script.parent))
    messages = report["generalDiagnostics"]
    found = {m["range"]["start"]["line"] + 1 for m in messages if m["severity"] == "error"}
    assert found == FAULTY, messages
    revealed = [m["message"] for m in messages if m["severity"] == "information"]
    assert [re.sub(r'.* is "(.*)"', r"\1", text) for text in revealed] == REVEALED


def test_annotations_are_types_at_run_time():
    """`help` shows types, not strings."""
    import inspect

    from tests.trace.calls import operations

    for operation in operations():
        signature = inspect.signature(operation.function)
        annotations = [p.annotation for p in signature.parameters.values()]
        texts = [a for a in (*annotations, signature.return_annotation) if isinstance(a, str)]
        assert not texts, f"{operation.label}: {texts}"
