"""Wheel, sdist and editable install: what they carry, and that the package imports from each."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "version.txt").read_text().strip()

pytest.importorskip("build", reason="needs the 'build' package (extra dev)")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command away from the checkout's own environment and return what it printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "FLASHINFER_"))}
    result = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=clean | env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build_products() -> set[Path]:
    """Files that a build could leave in the checkout."""
    patterns = ("build", "dist", "*.egg-info", "flashinfer/data", "flashinfer/_build_meta.py")
    return {path for pattern in patterns for path in ROOT.glob(pattern)}


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a wheel and an sdist built from this checkout, which stays as it was."""
    out = tmp_path_factory.mktemp("dist")
    before = build_products()
    for kind in ("--wheel", "--sdist"):
        run(sys.executable, "-m", "build", "--no-isolation", kind, "-o", out, ROOT, cwd=out)
    assert build_products() == before
    return out


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def sources(folder: str) -> set[str]:
    """Files of a source folder as git lists them, relative to the checkout."""
    suffixes = {".h", ".cuh", ".cu", ".cc", ".jinja"}
    return {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.suffix in suffixes}


def test_wheel_contents(wheel: Path):
    assert wheel.name == f"flashinfer_python-{VERSION}-py3-none-any.whl"
    assert wheel.stat().st_size < 5 * 2**20
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"flashinfer_python-{VERSION}.dist-info/METADATA").decode()
        scripts = archive.read(f"flashinfer_python-{VERSION}.dist-info/entry_points.txt").decode()
        meta = archive.read("flashinfer/_build_meta.py").decode()
    expected = {f"flashinfer/data/{n}" for n in sources("include") | sources("csrc")}
    assert expected <= names
    outside = {n for n in names if not n.startswith(("flashinfer/", "flashinfer_python-"))}
    assert not outside, f"a wheel installs the package only, not {sorted(outside)}"
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc"))]
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert "Requires-Python: >=3.10" in metadata and "License-Expression: Apache-2.0" in metadata
    assert "flashinfer = flashinfer.__main__:main" in scripts
    assert f'__version__ = "{VERSION}"' in meta and "__git_version__" in meta


def test_every_import_is_declared():
    """Every import of the package is a dependency, an optional one, or the standard library."""
    distribution = {"tvm_ffi": "apache-tvm-ffi", "pynvml": "nvidia-ml-py"}
    # Nothing imports typing_extensions at run time: type checkers bring it.
    optional = {"safetensors", "cupti", "flashinfer_jit_cache", "typing_extensions"}
    optional |= {"cuda", "cutlass"}  # of the extra cute-dsl
    imported = set()
    for path in (ROOT / "flashinfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0])
    ours = imported - set(sys.stdlib_module_names) - {"flashinfer"} - optional
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^dependencies = \[(.*?)\]", project, flags=re.S | re.M)
    missing = {n for n in ours if f'"{distribution.get(n, n)}>=' not in declared[1]}
    assert not missing


def test_sdist_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "-o",
        tmp_path,
        tree,
        cwd=tmp_path,
    )
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert first.namelist() == second.namelist()
        meta = "flashinfer/_build_meta.py"
        assert first.read(meta) == second.read(meta), "the sdist forgot its commit"


def test_installed_wheel_imports_and_has_sources(wheel: Path, tmp_path: Path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", target, wheel, cwd=tmp_path)
    code = (
        "import flashinfer; from flashinfer.jit import env;"
        "print(flashinfer.__version__, flashinfer.__file__);"
        "print(env.FLASHINFER_CSRC_DIR); print(env.FLASHINFER_INCLUDE_DIR)"
    )
    out = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).split("\n")
    assert out[0] == f"{VERSION} {target}/flashinfer/__init__.py"
    assert out[1] == f"{target}/flashinfer/data/csrc"
    assert out[2] == f"{target}/flashinfer/data/include"
    assert list(Path(out[1]).glob("*.cu")) and list(Path(out[2]).rglob("*.cuh"))


def test_bare_checkout_needs_no_install(tmp_path: Path):
    code = "import flashinfer; print(flashinfer.__version__, flashinfer.__file__)"
    out = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert out.split() == [VERSION, str(ROOT / "flashinfer" / "__init__.py")]


def test_editable_install_links_the_sources(tmp_path: Path):
    """The links of an editable install lead back into the checkout."""
    tree = tmp_path / "tree"
    for name in ("include/flashinfer", "csrc", "flashinfer", "3rdparty/fake/include"):
        (tree / name).mkdir(parents=True)
    code = "import sys, build_backend, pathlib; build_backend.link_data(pathlib.Path(sys.argv[1]))"
    for _ in range(2):  # a second install replaces the links of the first
        run(sys.executable, "-c", code, tree, cwd=tmp_path, PYTHONPATH=str(ROOT))
    data = tree / "flashinfer" / "data"
    for name in ("include", "csrc", "3rdparty/fake/include"):
        assert (data / name).is_symlink() and (data / name).resolve() == tree / name
        assert not os.readlink(data / name).startswith("/"), "a moved checkout keeps working"


def test_editable_wheel_leads_to_the_checkout(tmp_path: Path):
    """PEP 660: what is installed imports from the tree, and compiles the tree's sources."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    leave_out = shutil.ignore_patterns("data", "__pycache__", "_build_meta.py")
    for name in ("flashinfer", "include", "csrc", "3rdparty"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave_out)
    for name in ("pyproject.toml", "version.txt", "build_backend.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    code = "import build_backend, sys; build_backend.build_editable(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=tree, PYTHONPATH=str(tree))
    (editable,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    # A type checker reads paths from .pth files, and runs none of their code.
    (pth,) = site.glob("*.pth")
    assert pth.read_text().split() == [str(tree)]
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]); import flashinfer\n"
        "from flashinfer.jit import env\n"
        "print(flashinfer.__file__, env.FLASHINFER_CSRC_DIR.resolve())"
    )
    # Without the links of this environment, which lead to the checkout that is tested.
    folders = [p for p in sys.path if p and not (Path(p) / "flashinfer").exists()]
    path = os.pathsep.join([str(site), *folders])
    out = run(sys.executable, "-S", "-c", code, site, cwd=tmp_path, PYTHONPATH=path)
    assert out.split() == [str(tree / "flashinfer/__init__.py"), str(tree / "csrc")]
    assert (tree / "flashinfer/_build_meta.py").is_file()


def test_cutlass_pin_is_the_extra():
    from flashinfer.jit.thirdparty import CUTLASS

    assert f'cutlass = ["{CUTLASS.requirement}"]' in (ROOT / "pyproject.toml").read_text()
