"""Every snippet of docs/variants.md works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashinfer
from flashinfer.jit import current_compilation_context

TEXT = (Path(__file__).resolve().parents[2] / "docs/variants.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.S | re.M)


def execute(snippet: str, names: dict) -> None:
    exec(compile(snippet, "docs/variants.md", "exec"), names)


def test_every_snippet_is_found():
    assert len(SNIPPETS) == TEXT.count("```python") == 8
    assert sum("wrapper.run(" in snippet for snippet in SNIPPETS) == 3


@pytest.mark.compiler
@pytest.mark.slow
def test_variants_compile_and_plan_without_a_gpu(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """What needs a GPU comes as far as `run`, which has no reference of a user's variant."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-Werror all-warnings")
    current_compilation_context.reset()
    names: dict = {}
    planned = 0
    for snippet in SNIPPETS:
        snippet = snippet.replace('device="cuda"', 'device="cpu"')
        if "wrapper.run(" in snippet:
            with flashinfer.reference_backend(), pytest.raises(NotImplementedError, match="varia"):
                execute(snippet, names)
            planned += names["wrapper"]._problem is not None
        elif "assert_close" not in snippet:
            execute(snippet, names)
    assert planned == 3
    libraries = {path.name.split("_")[0] for path in tmp_path.rglob("*_custom_variant*.so")}
    assert libraries == {"head", "same", "sigmoid"}
