"""The NVRTC backend: finding the library, choosing it for a module, and its build steps."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import env
from . import cpp_ext, files, host_parts, toolchain
from . import env as jit_env
from .errors import ToolchainError
from .host_parts import HostPart

PROGRAM = Path(__file__).with_name("nvrtc_compile.py")
# nvcc's flags that say nothing to NVRTC: it compiles no host code and optimises by default.
_WITHOUT_MEANING = re.compile(r"-Xcompiler=.*|--expt-relaxed-constexpr|-O2")
_TAKEN = re.compile(r"-D.*|-std=.*|-use_fast_math")


def library() -> str | None:
    """Path of the NVRTC library, or None.

    Raises
    ------
    ToolchainError
        If ``FLASHINFER_NVRTC`` names no file.
    """
    if asked := env.FLASHINFER_NVRTC.get():
        if not asked.is_file():
            raise ToolchainError(
                f"FLASHINFER_NVRTC={str(asked)!r} is not a file.\n"
                "  hint: set it to the path of libnvrtc.so, or unset it"
            )
        return str(asked)
    return _search(env.CUDA_HOME.get(), env.CUDA_PATH.get())


@functools.lru_cache(maxsize=4)
def _search(*roots: str) -> str | None:
    return next((path for place in _places(roots) for path in _libraries_in(place)), None)


def _places(roots: Sequence[str]) -> Iterator[str]:
    """Folders where NVRTC may be: of Python packages, of PyTorch, of toolkits."""
    try:
        nvidia = importlib.util.find_spec("nvidia")
        torch = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        nvidia = torch = None
    for place in (nvidia and nvidia.submodule_search_locations) or ():
        # nvidia/cu13 is of CUDA 13 and later, nvidia/cuda_nvrtc of CUDA 12.
        majors = sorted(Path(place).glob("cu[0-9]*"), key=lambda p: int(p.name[2:]), reverse=True)
        yield from (f"{major}/lib" for major in majors)
        yield f"{place}/cuda_nvrtc/lib"
    yield from (f"{place}/lib" for place in (torch and torch.submodule_search_locations) or ())
    for root in (*roots, toolchain.SYSTEM_TOOLKIT):
        if root:
            yield f"{root}/lib64"


def _libraries_in(place: str) -> list[str]:
    found = [str(path) for path in Path(place).glob("libnvrtc.so*")]
    found += [
        str(path) for path in Path(place).glob("libnvrtc-*.so*") if "builtins" not in str(path)
    ]
    return sorted(found, key=len)[:1]


def part_for(name: str, content: str) -> HostPart | None:
    """The host part of a module if NVRTC is to compile it; None leaves it to nvcc."""
    if env.FLASHINFER_COMPILER.get() == "nvcc":
        return None
    part = host_parts.find(name, content)
    if part is None or (part.kernels and library() is None):
        return None
    return part


def why_not(name: str, content: str) -> str:
    """Why NVRTC does not compile a module, as the end of a sentence."""
    part = host_parts.find(name, content)
    if part is None:
        return host_parts.why_not(name, content)
    if env.FLASHINFER_COMPILER.get() == "nvcc":
        return "FLASHINFER_COMPILER=nvcc"
    return (
        "libnvrtc was not found: install nvidia-cuda-nvrtc (PyTorch for CUDA brings it), or set "
        "FLASHINFER_NVRTC"
    )


def ingredients(part: HostPart) -> dict[str, str]:
    """Identity of what compiles a module with this host part."""
    import tvm_ffi

    found = {"host part": part.library.sha256, "tvm_ffi": tvm_ffi.__version__}
    path = library()
    if part.kernels and path is not None:
        found["nvrtc"] = toolchain.nvrtc_version(path)
        found["standard headers"] = _standard_headers_digest()
    return found


def _standard_headers() -> Path:
    return jit_env.FLASHINFER_CSRC_DIR / "nvrtc" / "std"


def prelude() -> Path:
    """The header that stands before every source."""
    return _standard_headers() / "prelude.h"


def _standard_headers_digest() -> str:
    hashes = [f"{path.name}:{files.sha256(path)}" for path in sorted(_standard_headers().iterdir())]
    return toolchain.digest(hashes)[:16]


def options(flags: Sequence[str], include_dirs: Sequence[Path]) -> list[str]:
    """NVRTC's options for what nvcc is told.

    Parameters
    ----------
    flags : sequence of str
        Flags of nvcc without targets.
    include_dirs : sequence of Path
        Search path of our headers.

    Raises
    ------
    ToolchainError
        If a flag has no counterpart.
    """
    words = []
    for flag in flags:
        if _TAKEN.fullmatch(flag):
            words.append(flag.replace("-use_fast_math", "--use_fast_math"))
        elif not _WITHOUT_MEANING.fullmatch(flag):
            raise ToolchainError(f"NVRTC has no counterpart of nvcc's flag {flag}")
    # Without it, NVRTC refuses functions of plain structs, such as those of DeviceInfo.
    words.append("-default-device")
    return [*words, *(f"-I{folder}" for folder in (*include_dirs, _standard_headers()))]


@dataclass(frozen=True)
class NvrtcModule:
    """Everything that ninja needs to build one module with NVRTC.

    Attributes
    ----------
    name : str
        Name of the module.
    sources : sequence of Path
        Its `.cu` files.
    archs : sequence of str
        Targets, such as ``90a``.
    options : sequence of str
        Options of NVRTC.
    part : HostPart
        Launcher and binding.
    """

    name: str
    sources: Sequence[Path]
    archs: Sequence[str]
    options: Sequence[str]
    part: HostPart

    def links(self) -> dict[str, str]:
        """Folders that need a link to stand for them: none, unlike for nvcc."""
        return {}

    def problem_of(self, library: Path) -> str:
        """Why the kernels of the result do not fit its launcher, or nothing."""
        return self.part.problem_of(library)

    def command(self) -> list[str]:
        """The command, without its output."""
        words = [sys.executable, "-I", "-S", str(PROGRAM)]
        words += ["--host", *self.part.library.arguments()]
        if self.part.kernels:
            words += ["--nvrtc", library() or ""]
            sources = [prelude(), *self.sources]
            words += [w for source in sources for w in ("--source", os.path.abspath(source))]
            words += [w for arch in self.archs for w in ("--arch", arch)]
            words += ["--kernels", json.dumps(self.part.kernels)]
        return words

    def text(self, folder: str = "") -> str:
        """The whole of `build.ninja`, with the output in a folder."""
        escape = cpp_ext.ninja_path
        output = f"{escape(folder)}/" if folder else ""
        words = shlex.join(self.command()).replace("$", "$$")
        rest = shlex.join(self.options).replace("$", "$$")
        archive = escape(str(self.part.library.archive))
        return (
            "ninja_required_version = 1.8\n\nrule nvrtc\n"
            f"  command = {words} --out $out -- {rest}\n\n"
            f"build {output}{escape(self.name)}.so: nvrtc {archive}\n"
        )
