"""Builds all distributions and checks them; docs/release.md says what is what.

python -m tests.release --out dist
python -m tests.release --out dist --modules 'norm_*' --arch 9.0a --install
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from flashinfer.jit import nvrtc, toolchain
from flashinfer.jit.errors import ToolchainError
from tests import install_check

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL_BYTES = 4_000_000
VERSION = re.compile(r"\d+\.\d+\.\d+(\.post\d+)?")


class ReleaseError(Exception):
    """A distribution, or what belongs to it, is not fit to publish."""


def require(condition: bool, message: str) -> None:
    """Raise `ReleaseError` with a message unless a condition holds."""
    if not condition:
        raise ReleaseError(message)


def run(*words: str | Path, **env: str) -> str:
    """Run a command and return what it prints.

    Raises
    ------
    ReleaseError
        If it fails.
    """
    command = [str(word) for word in words]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, cwd=ROOT)
    require(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_tools() -> None:
    """Check that what comes last, the cubins, can be compiled here, before the first hour is spent.

    Raises
    ------
    ReleaseError
        If NVRTC, nvcc, a host compiler or objcopy is missing.
    """
    try:
        toolchain.require_toolkit()
        toolchain.require_host_compiler()
    except ToolchainError as error:
        raise ReleaseError(str(error)) from error
    found = nvrtc.library() is not None
    require(found, "libnvrtc was not found: install nvidia-cuda-nvrtc, or set FLASHINFER_NVRTC")
    require(shutil.which("objcopy") is not None, "objcopy was not found: install binutils")


def check_version(version: str, changelog: str, tags: Sequence[str]) -> None:
    """Check that a version has its form, its heading in CHANGELOG.md and, if any, its tag.

    Raises
    ------
    ReleaseError
        With what does not fit.
    """
    require(
        VERSION.fullmatch(version) is not None,
        f"version.txt must be major.minor.patch[.postN], got {version!r}",
    )
    headings = re.findall(r"^## (\S+)(?: .*)?$", changelog, flags=re.M)
    require(bool(headings), "CHANGELOG.md has no heading of a version")
    found = f"CHANGELOG.md begins with {headings[0]}, version.txt says {version}"
    require(headings[0] == version, found)
    entries = changelog.partition(f"## {version}")[2].partition("\n## ")[0]
    require("\n- " in entries, f"CHANGELOG.md says nothing of {version}")
    wrong = [tag for tag in tags if re.match(r"v\d", tag) and tag != f"v{version}"]
    require(not wrong, f"this commit has the tag {', '.join(wrong)}, version.txt says {version}")


def metadata(wheel: Path) -> dict[str, str]:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return dict(Parser().parsestr(archive.read(name).decode()).items())


def check_wheel(wheel: Path, version: str) -> None:
    """Check name, version and size of a wheel of the package.

    Raises
    ------
    ReleaseError
        With what does not fit.
    """
    found = metadata(wheel)
    named = (found["Name"], found["Version"])
    require(named == ("flashinfer-python", version), f"{wheel.name} is {' '.join(named)}")
    size = wheel.stat().st_size
    require(size <= MAX_WHEEL_BYTES, f"{wheel.name} has {size} bytes, {MAX_WHEEL_BYTES} at most")


def check_sdist(sdist: Path, wheel: Path) -> None:
    """Check that an sdist has every Python file and header that a wheel of it has.

    Raises
    ------
    ReleaseError
        If one is missing.
    """
    with tarfile.open(sdist) as archive:
        has = {member.name.partition("/")[2] for member in archive.getmembers()}
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n and "data/host/" not in n]
    missing = {n.removeprefix("flashinfer/data/") for n in names} - has
    require(not missing, f"{sdist.name} lacks {', '.join(sorted(missing))}")


def check_cubins(cubins: Path, package: Path) -> None:
    """Check that a wheel of cubins has the manifest that a wheel of the package signs off.

    Raises
    ------
    ReleaseError
        If it is another one.
    """
    with zipfile.ZipFile(cubins) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/checksums.txt"))
        found = hashlib.sha256(archive.read(name)).hexdigest()
    with zipfile.ZipFile(package) as archive:
        meta = archive.read("flashinfer/_build_meta.py").decode()
    pinned = f'__cubins_sha256__ = "{found}"' in meta
    require(pinned, f"{package.name} does not sign off the manifest of {cubins.name}, {found}")


def check_descriptions(files: Sequence[Path]) -> str:
    """Let twine check what an index shows, where twine is installed; returns what was done."""
    if importlib.util.find_spec("twine") is None:
        return "twine is not installed: descriptions are not checked"
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return "twine check: passed"


def build(out: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Build the distributions into a folder; returns them by kind."""
    pack = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    link = ["-C", f"repository={options.repository}"] if options.repository else []
    targets = {"FLASHINFER_CUDA_ARCH_LIST": options.arch} if options.arch else {}
    run(*pack, "--sdist", "--wheel", *link, "-o", out, ROOT)
    built = {"sdist": _only(out, "*.tar.gz"), "wheel": _only(out, "*-any.whl")}
    with tempfile.TemporaryDirectory(prefix="flashinfer-release-") as scratch:
        parts = Path(scratch) / "host"
        patterns = options.modules.split()
        cubins = Path(scratch) / "cubins"
        from_parts = {"FLASHINFER_HOST_DIR": str(parts)}
        flashinfer = [sys.executable, "-m", "flashinfer"]
        run(*flashinfer, "build-host-parts", parts, *patterns, "--long-kernels", **targets)
        run(*flashinfer, "build-cubins", cubins, *patterns, **targets, **from_parts)
        extra = ["-C", f"host-parts={parts}", "-C", f"cubins={cubins}"]
        run(*pack, "--wheel", *link, *extra, "-o", out, ROOT)
        built["platform wheel"] = _only(out, "flashinfer_python-*-manylinux_*.whl")
        chosen = [f"--config-setting=modules={options.modules}"] if patterns else []
        for folder in (out, Path(scratch)):
            # The second is compiled again, elsewhere.
            cache = {"FLASHINFER_WORKSPACE_BASE": f"{scratch}/cache-of-{folder.name}"}
            command = [*pack, "--wheel", *chosen, "-o", folder]
            run(*command, ROOT / "flashinfer-jit-cache", **targets, **cache)
            run(*command, ROOT / "flashinfer-cubin", **targets, **cache, **from_parts)
        for kind in ("jit-cache", "cubin"):
            pattern = f"flashinfer_{kind.replace('-', '_')}-*.whl"
            built[kind] = _only(out, pattern)
            same = _only(Path(scratch), pattern).read_bytes() == built[kind].read_bytes()
            require(same, f"a second flashinfer-{kind} wheel has other bytes")
        check_cubins(built["cubin"], built["platform wheel"])
    return built


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    require(len(found) == 1, f"{folder} has {len(found)} files {pattern}, empty it first")
    return found[0]


def check_installs(built: dict[str, Path]) -> None:
    """Install the wheels into new environments, with the newest and the lowest dependencies."""
    wheel = built["platform wheel"]
    beside = built["jit-cache"], built["cubin"]
    for pins in ([], install_check.lowest(wheel)):
        with tempfile.TemporaryDirectory(prefix="flashinfer-install-") as folder:
            try:
                install_check.check(sys.executable, wheel, pins, Path(folder), beside)
            except RuntimeError as error:
                raise ReleaseError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.release")
    parser.add_argument("--out", type=Path, required=True, help="folder for the distributions")
    parser.add_argument("--modules", default="", help="patterns of modules; by default all")
    parser.add_argument("--arch", default="", help="targets of what is compiled")
    parser.add_argument("--repository", default="", help="address of the sources")
    parser.add_argument("--install", action="store_true", help="install into new environments")
    options = parser.parse_args(arguments)
    version = (ROOT / "version.txt").read_text().strip()
    out = options.out.absolute()
    try:
        tags = run("git", "tag", "--points-at", "HEAD").split() if (ROOT / ".git").exists() else []
        check_version(version, (ROOT / "CHANGELOG.md").read_text(), tags)
        check_tools()
        out.mkdir(parents=True, exist_ok=True)
        built = build(out, options)
        for kind in ("wheel", "platform wheel"):
            check_wheel(built[kind], version)
        check_sdist(built["sdist"], built["platform wheel"])
        for kind in ("jit-cache", "cubin"):
            needs = metadata(built[kind])["Requires-Dist"]
            require(needs == f"flashinfer-python=={version}", f"flashinfer-{kind} needs {needs}")
        print(check_descriptions(list(built.values())))
        if options.install:
            check_installs(built)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    for kind, file in built.items():
        print(f"{kind:14s} {file.stat().st_size / 1e6:6.2f} MB  {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
