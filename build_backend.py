"""PEP 517/660 build backend: setuptools, plus the sources that the JIT compiles.

A wheel carries `include/`, `csrc/` and whatever third-party headers lie under `3rdparty/` as copies
in `flashinfer/data/`; an editable install has links there, so that an edited header is compiled on
next use. `flashinfer/_build_meta.py` records version and commit.

`README.index.md` is README.md for an index page, where relative links lead nowhere. The setting
`repository` (`python -m build -C repository=https://...`) adds the address of the sources to the
metadata, and links lead there. Otherwise a link becomes the path of a file that the sdist has.

The setting `host-parts` names a folder that `flashinfer build-host-parts` made (`python -m build
-C host-parts=FOLDER`). The wheel then has it as `flashinfer/data/host/`, compiles its modules with
NVRTC alone, and is for one platform. The setting `cubins` names a folder of `flashinfer
build-cubins`: the SHA-256 of its manifest becomes part of the package, which signs off downloads.

Wheels and sdists are built from a copy of the tree in a temporary folder. The checkout is not
written, so it stays clean and two builds may run at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from setuptools import build_meta as _setuptools

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent
DATA = Path("flashinfer", "data")
META = Path("flashinfer", "_build_meta.py")
INDEX_README = "README.index.md"
PROJECT_FILES = ("pyproject.toml", "version.txt", "README.md", "LICENSE", "build_backend.py")
# What an sdist has beyond the files that a wheel is made from. A test compares it with git's list.
SDIST_EXTRA = (
    ".ci", ".clang-format", ".claude", ".gitignore", ".pre-commit-config.yaml", "3rdparty",
    "CHANGELOG.md", "CLAUDE.md", "Makefile", "benchmarks", "csrc", "docs", "examples",
    "flashinfer-cubin", "flashinfer-jit-cache", "include", "prebuilt_wheels.py", "tests",
)  # fmt: skip
URLS = "[project.urls]\n"
BUILD_PRODUCTS = shutil.ignore_patterns(
    "__pycache__", "*.py[cod]", "*.so", "*.o", "*.egg-info", ".*_cache", ".hypothesis"
)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Names that no distribution copies: build products, and what is made afresh for each."""
    generated = {DATA.name, META.name} if Path(folder) == ROOT / DATA.parent else set()
    return set(BUILD_PRODUCTS(folder, names)) | generated.intersection(names)


def data_sources(root: Path = ROOT) -> dict[str, Path]:
    """Folders that reach `flashinfer/data/`, by the name they have there."""
    sources = {"include": root / "include", "csrc": root / "csrc"}
    for folder in sorted((root / "3rdparty").glob("*/include")):
        sources[f"3rdparty/{folder.parent.name}/include"] = folder
    return sources


def platform_tag(folder: Path) -> str:
    """The tag of a wheel with these libraries: the newest version of glibc that they ask for."""
    minors = [
        int(minor)
        for library in folder.glob("*.xz")
        for minor in re.findall(rb"GLIBC_2\.(\d+)\b", lzma.decompress(library.read_bytes()))
    ]
    if not minors:
        raise ValueError(f"host-parts: {folder} has no libraries; `flashinfer build-host-parts`")
    return f"manylinux_2_{max(minors)}_{platform.machine()}"


def git_commit(root: Path = ROOT) -> str:
    """Commit of the checkout (`-dirty` if files differ), or the one an sdist was made from."""
    git = ["git", "-C", str(root)]
    try:
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True)
        if top.returncode == 0 and Path(top.stdout.strip()).resolve() == root:
            commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
            changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
            return commit + ("-dirty" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    with contextlib.suppress(OSError):
        recorded = re.search(r'__git_version__ = "([^"]*)"', (root / META).read_text())
        if recorded:
            return recorded[1]
    return "unknown"


def cubins_sha256(settings: Mapping[str, str] | None) -> str:
    """SHA-256 of the manifest of the cubins that the builder names, or "unknown"."""
    if named := (settings or {}).get("cubins"):
        version = (ROOT / "version.txt").read_text().strip()
        manifest = Path(named).absolute() / version / "checksums.txt"
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    return "unknown"


def write_build_meta(root: Path, settings: Mapping[str, str] | None) -> None:
    """Write version, commit and hash of cubins to `flashinfer/_build_meta.py` under `root`."""
    version = (ROOT / "version.txt").read_text().strip()
    text = (
        '"""Written by build_backend.py."""\n\n'
        f'__version__ = "{version}"\n__git_version__ = "{git_commit()}"\n'
        f'__cubins_sha256__ = "{cubins_sha256(settings)}"\n'
    )
    (root / META).write_text(text)


def with_repository(project: str, settings: Mapping[str, str] | None) -> str:
    """The text of pyproject.toml with the address of the sources that the builder gives."""
    address = (settings or {}).get("repository", "").rstrip("/")
    if not address:
        return project
    if not re.fullmatch(r"https?://[\w.:/~-]+", address):
        raise ValueError(f"repository must be an address such as https://..., got {address!r}")
    return project.replace(URLS, f'{URLS}Repository = "{address}"\n')


def index_readme(text: str, project: str) -> str:
    """README.md for an index page.

    Parameters
    ----------
    text : str
        README.md.
    project : str
        pyproject.toml: with `Repository` among its URLs, relative links lead to the files there.
    """
    repository = re.search(r'^Repository = "(.*)"$', project, flags=re.M)
    version = (ROOT / "version.txt").read_text().strip()

    def rewritten(link: re.Match[str]) -> str:
        label, target = link[1], link[2]
        if repository:
            return f"[{label}]({repository[1]}/blob/v{version}/{target})"
        return f"`{target}`" if label.strip("`") == target else f"{label} (`{target}`)"

    relative = r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)"
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # each second one is a code block
    parts[::2] = [re.sub(relative, rewritten, part) for part in parts[::2]]
    return "".join(parts)


@contextlib.contextmanager
def _staged(
    settings: Mapping[str, str] | None, extra: tuple[str, ...] = (), with_data: bool = False
) -> Iterator[None]:
    """Copy the project to a temporary folder and make it the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="flashinfer-build-") as temp:
        stage = Path(temp)
        for name in (*PROJECT_FILES, "flashinfer", *extra):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, stage / name, ignore=_ignored)
            elif source.is_file():
                shutil.copy2(source, stage / name)
        if with_data:
            for name, source in data_sources().items():
                shutil.copytree(source, stage / DATA / name, ignore=_ignored)
            _add_host_parts(stage, settings)
        write_build_meta(stage, settings)
        project = with_repository((ROOT / "pyproject.toml").read_text(), settings)
        (stage / "pyproject.toml").write_text(project)
        (stage / INDEX_README).write_text(index_readme((ROOT / "README.md").read_text(), project))
        if extra:
            folders = ("flashinfer", *extra)
            grafts = [f"graft {name}" for name in folders if (stage / name).is_dir()]
            files = [
                f"include {name}" for name in (*PROJECT_FILES, *extra) if (stage / name).is_file()
            ]
            (stage / "MANIFEST.in").write_text("\n".join([*grafts, *files]) + "\n")
        os.chdir(stage)
        try:
            yield
        finally:
            os.chdir(before)


def _add_host_parts(stage: Path, settings: Mapping[str, str] | None) -> None:
    """Copy the host parts that the builder names, and make the wheel one for their platform."""
    if named := (settings or {}).get("host-parts"):
        folder = Path(named).absolute()
        tag = platform_tag(folder)
        target = stage / DATA / "host"
        target.mkdir(parents=True)
        for file in (*sorted(folder.glob("*.xz")), folder / "index.json"):
            shutil.copy2(file, target)
        (stage / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {tag}\n")


def link_data(root: Path = ROOT) -> None:
    """Point `flashinfer/data/*` at the folders of this checkout."""
    data = root / DATA
    if data.is_symlink() or data.is_file():
        data.unlink()
    elif data.is_dir():
        shutil.rmtree(data)
    for name, source in data_sources(root).items():
        link = data / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(source, link.parent), target_is_directory=True)


def get_requires_for_build_wheel(config_settings=None):
    """Nothing beyond pyproject.toml. Finding that out, setuptools would write into the checkout."""
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    target = os.path.abspath(wheel_directory)
    with _staged(config_settings, with_data=True):
        return _setuptools.build_wheel(target, config_settings, None)


def build_sdist(sdist_directory, config_settings=None):
    target = os.path.abspath(sdist_directory)
    with _staged(config_settings, extra=SDIST_EXTRA):
        return _setuptools.build_sdist(target, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    target = os.path.abspath(metadata_directory)
    with _staged(config_settings):
        return _setuptools.prepare_metadata_for_build_wheel(target, config_settings)


# Metadata does not depend on how the package is installed.
prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    link_data()
    write_build_meta(ROOT, None)
    # Type checkers follow a path in a .pth file; they do not run setuptools' import hook.
    settings = {"editable_mode": "compat", **(config_settings or {})}
    readme = ROOT / INDEX_README
    readme.write_text((ROOT / "README.md").read_text())
    try:
        return _setuptools.build_editable(wheel_directory, settings, None)
    finally:
        readme.unlink()
