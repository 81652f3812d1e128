"""The door to the package that computes: public names alone, and another package in its place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import examples.serve
import flashinfer
from examples.serve import kernels
from examples.serve.__main__ import main
from examples.serve.mistakes import lacking

FOLDER = Path(examples.serve.__file__).parent
# They look into this package: what its compilers make, and where the time of a step goes.
ABOUT_THIS_PACKAGE = {"binaries.py", "demo.py", "modules.py"}


def _names(path: Path) -> set[str]:
    """Names that a file reaches through the door, as ``fused_moe.cutlass_fused_moe``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id == "kernels" and parts:
            names.add(".".join(parts))
    return names


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_package", None)


def test_the_engine_uses_public_names_alone():
    own = {name for name in vars(kernels) if not name.startswith("_")}
    found = set()
    for path in FOLDER.rglob("*.py"):
        if path.name not in ABOUT_THIS_PACKAGE:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    named = [alias.name for alias in node.names]
                    module = getattr(node, "module", None) or ""
                    assert not any(name.startswith("flashinfer") for name in [*named, module]), path
            if "import kernels" in path.read_text():
                found |= {name for name in _names(path) if name.split(".")[0] not in own}
    assert {"rmsnorm", "fused_moe.cutlass_fused_moe", "mamba.ssd_combined_fwd"} <= found
    for name in found:
        value = kernels
        for part in name.split("."):
            assert not part.startswith("_"), name
            value = getattr(value, part)


def test_another_package_serves(tmp_path: Path, package: None, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "otherinfer").mkdir()
    (tmp_path / "otherinfer" / "__init__.py").write_text("__version__ = '9'\nrmsnorm = 'its norm'")
    (tmp_path / "otherinfer" / "mla.py").write_text("run = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels.use("otherinfer")
    assert kernels.rmsnorm == "its norm" and kernels.mla.run == 1
    assert kernels.describe() == "otherinfer 9"
    message = "otherinfer 9 has no `softmax`, which this model"
    with pytest.raises(click.ClickException, match=message), lacking():
        kernels.softmax  # noqa: B018
    with pytest.raises(ValueError, match="`device` must be a GPU: otherinfer 9"):
        kernels.on(torch.device("cpu"))


def test_the_folder_of_another_flashinfer(tmp_path: Path):
    """Nothing of the engine imports one before the command line has said which."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("__version__ = '0.7.2'")
    code = "import sys, examples.serve.__main__, examples.serve.bench; "
    code += f"from examples.serve import kernels; kernels.use({str(tmp_path)!r}); "
    code += "print(kernels.describe(), kernels.package().__file__)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert out.stdout.split() == ["FlashInfer", "0.7.2", str(tmp_path / "flashinfer/__init__.py")]


def test_a_folder_of_that_name_where_the_engine_starts(
    tmp_path: Path, package: None, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "flashinfer").mkdir()
    monkeypatch.chdir(tmp_path)
    assert kernels.package() is flashinfer


def test_mistakes(tmp_path: Path, package: None):
    (tmp_path / "flashinfer").mkdir()
    for name, message in (("nowhere", "No module named"), (str(tmp_path), "must come before")):
        result = CliRunner().invoke(main, ["generate", "--kernels", name, "x"])
        assert result.exit_code == 2 and message in result.stderr


def test_this_package_is_the_default(package: None):
    assert kernels.package() is flashinfer
    assert kernels.describe() == f"FlashInfer {flashinfer.__version__}"
    assert kernels.compile_seconds() >= 0
    assert kernels.is_failure(flashinfer.jit.BuildError("x")) and not kernels.is_failure(OSError())
    with kernels.on(torch.device("cpu")):
        assert flashinfer.rmsnorm(torch.ones(1, 8), torch.ones(8)).allclose(torch.ones(1, 8))
