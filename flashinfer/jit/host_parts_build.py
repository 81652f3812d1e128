"""Builds host parts, when a wheel is made: nvcc, the host compiler and objcopy are needed.

nvcc compiles a launcher as for a module. Its device code is taken out of the object file; what is
left registers the kernels by name with `csrc/nvrtc/driver_runtime.cc`, which is linked instead of
the CUDA runtime. The device code, PTX, says how large the parameters are that a launcher passes,
and for which modules NVRTC takes long.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import lzma
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .. import env
from . import cpp_ext, cubins_build, fingerprint, host_parts, process, toolchain
from . import env as jit_env
from .core import JitSpec
from .cubin_manifest import needed_cuda
from .errors import ToolchainError, build_error
from .log import logger
from .resources import default_jobs
from .spec import ModuleSpec

_RUNTIME = "driver_runtime.o"
_EMPTY = "no_device_code"
_DEVICE_CODE = ".device"
# Unpacking this much takes a thirtieth of a second; with half of it archives are a fifth larger.
_BLOCK = 16 << 20
_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 9}
# Instructions have 16 bytes. Told so, by the four lowest bits of a byte's place, the packer makes
# cubins 6 % smaller; libraries 1 % larger.
_FILTER_OF_CUBINS = {**_FILTER, "lc": 0, "lp": 4, "pb": 4}
# Lines of PTX of a kernel; NVRTC takes more than a second for that many. The wheel has 3.92 MB
# then, and may have 4.
_LONG = 8_100
_SMALL = ("-Os", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-ffunction-sections")


class HostPartModule(cpp_ext.NinjaModule):
    """The build steps of a host part; ninja runs in the folder above that of the outputs."""

    def runtime_link_flags(self) -> list[str]:
        return [_RUNTIME, "-ldl", "-Wl,--gc-sections", "-Wl,-s"]

    def commands(self, links: Mapping[str, str] | None = None) -> dict[str, str]:
        commands = super().commands(links)
        if "nvcc" in commands:
            commands["nvcc"] += (
                f" && objcopy --dump-section .nv_fatbin=$out{_DEVICE_CODE}"
                f" --update-section .nv_fatbin={_EMPTY} $out"
            )
        return commands


def build(
    specs: Sequence[ModuleSpec],
    out_dir: Path,
    verbose: bool = False,
    long_kernels: bool = False,
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
    long_kernels : bool
        Compile the kernels for which NVRTC takes longest, and add them.

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
    served = [spec for spec in specs if _is_served(spec, left_out)]
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flashinfer-host-") as temporary:
        scratch = Path(temporary)
        if served:
            _compile(served, scratch, verbose)
        libraries = {spec.name: _library(spec, scratch).read_bytes() for spec in served}
        archives, places = _pack(libraries, out_dir)
        parts = {spec.name: places[spec.name] | _facts_of(spec, scratch) for spec in served}
        # What is no JitSpec stands for users' variants, whose kernels are their own.
        loaded = [spec for spec in served if isinstance(spec, JitSpec)] if long_kernels else []
        long = [spec for spec in loaded if _longest_kernel(spec, scratch) >= _LONG]
    _extend_index(out_dir, archives, parts)
    if long:
        add_cubins(long, out_dir, verbose)
    return left_out


def add_cubins(specs: Sequence[ModuleSpec], out_dir: Path, verbose: bool = False) -> None:
    """Compile the kernels of modules with NVRTC, and put them beside their host parts.

    Raises
    ------
    JitError
        If NVRTC is missing, or fails.
    """
    with (
        tempfile.TemporaryDirectory(prefix="flashinfer-cubins-") as temporary,
        env.temporary("FLASHINFER_HOST_DIR", str(out_dir)),
    ):
        folder = Path(temporary)
        cubins_build.build(specs, folder, verbose or None)
        cubins = {
            f"{path.parent.name}-{path.stem.rpartition('-')[2]}": path.read_bytes()
            for path in folder.glob("*/*/*.cubin")
        }
    archives, places = _pack(cubins, out_dir, _FILTER_OF_CUBINS)
    index = host_parts.read_index(out_dir)
    parts = {spec.name: index.parts[spec.name] | {"cubins": {}} for spec in specs}
    for name, place in places.items():
        module, _, arch = name.rpartition("-")
        parts[module]["cubins"][arch] = place | {"cuda": needed_cuda(cubins[name])}
    _extend_index(out_dir, archives, parts)


def _extend_index(out_dir: Path, archives: dict[str, str], parts: dict[str, dict]) -> None:
    """Write an index with further entries, and remove the archives that none names any more."""
    index = host_parts.read_index(out_dir)
    archives, parts = {**index.archives, **archives}, {**index.parts, **parts}
    cubins = (cubin for part in parts.values() for cubin in part.get("cubins", {}).values())
    used = {entry["archive"] for entry in (*parts.values(), *cubins)}
    for name in archives.keys() - used:
        (out_dir / name).unlink(missing_ok=True)
    archives = {name: archives[name] for name in used}
    host_parts.write_index(out_dir, host_parts.Index(archives, parts))


def _is_served(spec: ModuleSpec, left_out: dict[str, str]) -> bool:
    if spec.needs_device_linking:
        left_out[spec.name] = "its device code is linked"
        return False
    try:
        spec.nvrtc_options()
    except ToolchainError as error:
        left_out[spec.name] = str(error)
        return False
    return True


def _library(spec: ModuleSpec, scratch: Path) -> Path:
    return scratch / spec.name / f"{spec.name}.so"


def _facts_of(spec: ModuleSpec, scratch: Path) -> dict[str, object]:
    """The entry of a module in the index, without the place of its library."""
    return {
        "content": spec.host_key()[1],
        "kernels": kernels_of(_library(spec, scratch)),
        "parameters": parameters_of(_device_code(spec, scratch)),
    }


def _device_code(spec: ModuleSpec, scratch: Path) -> Iterator[Path]:
    return (scratch / spec.name).glob(f"*{_DEVICE_CODE}")


def _longest_kernel(spec: ModuleSpec, scratch: Path) -> int:
    """Lines of PTX of the longest kernel of a module."""
    texts = (path.read_bytes() for path in _device_code(spec, scratch))
    kernels = (kernel for text in texts for kernel in re.split(rb"\.entry\s", text)[1:])
    return max((kernel.count(b"\n") for kernel in kernels), default=0)


def _blocks(contents: Mapping[str, bytes]) -> Iterator[list[str]]:
    """Names in their order, by which alike files are neighbours, as many as an archive may hold."""
    block: list[str] = []
    size = 0
    for name in sorted(contents):
        if block and size + len(contents[name]) > _BLOCK:
            yield block
            block, size = [], 0
        block.append(name)
        size += len(contents[name])
    if block:
        yield block


def _pack(
    contents: Mapping[str, bytes], out_dir: Path, packer: Mapping[str, int] = _FILTER
) -> tuple[dict[str, str], dict[str, dict[str, object]]]:
    """Write archives of files; the hash of each archive, and the place of each file."""
    archives, places = {}, {}
    for block in _blocks(contents):
        packed = lzma.compress(b"".join(contents[name] for name in block), filters=[packer])
        sha256 = hashlib.sha256(packed).hexdigest()
        archive = f"{sha256[:16]}.xz"
        (out_dir / archive).write_bytes(packed)
        archives[archive] = sha256
        offset = 0
        for name in block:
            places[name] = {
                "archive": archive,
                "offset": offset,
                "size": len(contents[name]),
                "sha256": hashlib.sha256(contents[name]).hexdigest(),
            }
            offset += len(contents[name])
    return archives, places


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
        words.append("--no-compress")
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


def parameters_of(device_code: Iterable[Path]) -> dict[str, int]:
    """Bytes of each kernel's parameters, by mangled name, from containers with plain PTX."""
    return {
        name.decode(): _end_of_parameters(declared)
        for path in device_code
        for name, declared in re.findall(rb"\.entry\s+(\w+)\s*\(([^)]*)\)", path.read_bytes())
    }


def _end_of_parameters(declared: bytes) -> int:
    """Where the last of some parameters ends: ``.param .align 8 .b8 p_param_0[24]``, ..."""
    end = 0
    for alignment, bits, number in re.findall(
        rb"\.param(?:\s+\.align\s+(\d+))?\s+\.[bsuf](\d+)[^,\[]*(?:\[(\d+)\])?", declared
    ):
        size = int(bits) // 8
        step = int(alignment or size)
        end = -(-end // step) * step + size * int(number or 1)
    return end


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
