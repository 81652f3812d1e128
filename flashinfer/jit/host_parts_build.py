"""Builds host parts, when a wheel is made: nvcc, the host compiler and objcopy are needed.

nvcc compiles a launcher as for a module. Its device code is taken out of the object file; what is
left registers the kernels by name with `csrc/nvrtc/driver_runtime.cc`, which is linked instead of
the CUDA runtime.
"""

from __future__ import annotations

import ctypes
import dataclasses
import lzma
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import cpp_ext, files, fingerprint, host_parts, process, toolchain
from . import env as jit_env
from .errors import ToolchainError, build_error
from .log import logger
from .resources import default_jobs
from .spec import ModuleSpec

_RUNTIME = "driver_runtime.o"
_EMPTY = "no_device_code"
_SMALL = ("-Os", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-ffunction-sections")


class HostPartModule(cpp_ext.NinjaModule):
    """The build steps of a host part; ninja runs in the folder above that of the outputs."""

    def runtime_link_flags(self) -> list[str]:
        return [_RUNTIME, "-ldl", "-Wl,--gc-sections", "-Wl,-s"]

    def commands(self, links: Mapping[str, str] | None = None) -> dict[str, str]:
        commands = super().commands(links)
        if "nvcc" in commands:
            commands["nvcc"] += f" && objcopy --update-section .nv_fatbin={_EMPTY} $out"
        return commands


def build(
    specs: Sequence[ModuleSpec], out_dir: Path, verbose: bool = False, unproven: bool = False
) -> dict[str, str]:
    """Build the host parts of modules into a folder, with its index.

    Parameters
    ----------
    specs : sequence of ModuleSpec
        The modules.
    out_dir : Path
        The folder; what it has of other modules stays.
    verbose : bool
        Log each command.
    unproven : bool
        Take families too whose kernels have not run through NVRTC on a GPU.

    Returns
    -------
    dict of str to str
        The modules that NVRTC cannot serve, each with the reason.

    Raises
    ------
    BuildError
        If a compiler fails.
    """
    left_out: dict[str, str] = {}
    served = [spec for spec in specs if _is_served(spec, left_out, unproven)]
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flashinfer-host-") as temporary:
        scratch = Path(temporary)
        if served:
            _compile(served, scratch, verbose)
        index = host_parts.read_index(out_dir)
        for spec in served:
            library = scratch / spec.name / f"{spec.name}.so"
            target = out_dir / f"{spec.name}.so.xz"
            target.write_bytes(lzma.compress(library.read_bytes()))
            index[spec.name] = {
                "content": spec.identity(with_toolchain=False).content,
                "sha256": files.sha256(target),
                "kernels": kernels_of(library),
            }
    host_parts.write_index(out_dir, index)
    return left_out


def _is_served(spec: ModuleSpec, left_out: dict[str, str], unproven: bool) -> bool:
    if not unproven and not host_parts.is_served(spec.name):
        left_out[spec.name] = "its family has not run through NVRTC on a GPU"
        return False
    if spec.needs_device_linking:
        left_out[spec.name] = "its device code is linked"
        return False
    try:
        spec.nvrtc_options()
    except ToolchainError as error:
        left_out[spec.name] = str(error)
        return False
    return True


def _compile(specs: Sequence[ModuleSpec], scratch: Path, verbose: bool) -> None:
    (scratch / _EMPTY).write_bytes(bytes(8))
    _compile_runtime(scratch)
    lines = []
    for spec in specs:
        folder = scratch / spec.name
        folder.mkdir()
        module = _as_host_part(spec)
        for place, link in module.links().items():
            (folder / link).symlink_to(place)
        (folder / "build.ninja").write_text(module.text(spec.name))
        lines.append(f"subninja {spec.name}/build.ninja\n")
    (scratch / "all.ninja").write_text("".join(lines))
    command = [toolchain.require_ninja(), "-C", str(scratch), "-f", "all.ninja", "-k0"]
    command += [f"-j{default_jobs()}", *(["-v"] if verbose else [])]

    def show(line: str) -> None:
        logger.info("%s", line.rstrip())

    output, code = process.run_ninja(command, show if verbose else _ignore, _ignore)
    if code != 0:
        raise build_error("Building host parts failed.", output, "above")


def _ignore(*_: object) -> None:
    """Takes what ninja prints, and does nothing."""


def _compile_runtime(scratch: Path) -> None:
    source = jit_env.FLASHINFER_CSRC_DIR / "nvrtc" / "driver_runtime.cc"
    includes = [w for d in toolchain.require_toolkit().include_dirs for w in ("-isystem", d)]
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", *_SMALL, *includes]
    compiler = toolchain.require_host_compiler().path
    command = [compiler, *flags, "-c", str(source), "-o", str(scratch / _RUNTIME)]
    output, code = process.ask(command, 600)
    if code != 0:
        raise build_error(f"Compiling {source} failed.", output, "above")


def _as_host_part(spec: ModuleSpec) -> HostPartModule:
    """The build of a module with PTX for one architecture, which is cheap and thrown away."""
    module = spec.ninja_module()
    _, archs = fingerprint.split_targets(module.flags.cuda)
    words = [w for w in module.flags.cuda if "gencode" not in w]
    if archs:
        words.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    flags = dataclasses.replace(module.flags, cuda=tuple(words))
    return HostPartModule(**{**vars(module), "flags": flags})


def kernels_of(library: Path) -> dict[str, str]:
    """The kernels that a host part registers: the C++ expression for each mangled name."""
    import tvm_ffi  # noqa: F401  the library that a host part needs is loaded with it

    names_of = ctypes.CDLL(str(library)).flashinfer_kernel_names
    count = names_of(None, 0)
    names = (ctypes.c_char_p * count)()
    names_of(names, count)
    return {name.decode(): name_expression(demangled(name)) for name in names}


def demangled(name: bytes) -> str:
    """The C++ name of a symbol."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name, None, None, ctypes.byref(status))
    if status.value != 0:
        return name.decode()
    try:
        return ctypes.string_at(text).decode()
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(text)


def name_expression(signature: str) -> str:
    """The expression that names a kernel: its signature without result and parameters.

    ``void f<T, (E)0>(Params)`` gives ``f<T, (E)0>``.
    """
    depth = 0
    for i in range(len(signature) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(signature[i], 0)
        if depth == 0:
            return signature[:i].removeprefix("void ")
    return signature
