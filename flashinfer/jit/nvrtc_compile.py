"""A program: compiles the kernels of a module with NVRTC and appends them to its host part.

Ninja starts it, with the standard library alone. A crash, a hang or a lack of memory in the
compiler ends this process and no other.

    nvrtc_compile.py --nvrtc LIB --version             prints the version of the library
    nvrtc_compile.py --nvrtc LIB --host ARCHIVE OFFSET SIZE --out FILE --source FILE ...
                     --arch 90a ... --kernels JSON [-- options of NVRTC]
    nvrtc_compile.py --host ARCHIVE OFFSET SIZE --out FILE
                     --cubin 90a FILE ... --packed-cubin 90a ARCHIVE OFFSET SIZE ...
                                                       compiles nothing

The host part lies at an offset of the unpacked archive, as a packed cubin does. The output is it, a
container of cubins and a trailer; csrc/nvrtc/driver_runtime.cc describes the format and reads it.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import lzma
import os
import re
import struct
import sys

MAGIC = b"FICUBIN1"
CONTAINER_MAGIC = 0xBA55ED50
CONTAINER_HEADER, ENTRY_HEADER = 16, 64
KIND_CUBIN = 2
SUFFIX_FLAGS = {"": 0, "a": 1 << 20, "f": 1 << 21}


class CompileError(Exception):
    """NVRTC refused the source; the message is its log."""


class Compiler:
    """The NVRTC library of a path.

    Raises
    ------
    OSError
        If the library cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        # NVRTC opens its built-in headers by name alone, which finds them once they are loaded.
        for part in sorted(glob.glob(f"{glob.escape(os.path.dirname(path))}/libnvrtc-builtins*")):
            if ".alt." not in os.path.basename(part):
                ctypes.CDLL(part, mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> str:
        """Major and minor version, such as ``13.0``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def cubin(self, text: str, arch: str, kernels: dict[str, str], options: list[str]) -> bytes:
        """Compile kernels for one architecture.

        Parameters
        ----------
        text : str
            The source.
        arch : str
            Such as ``90a``.
        kernels : dict of str to str
            The expression that names each kernel, by mangled name.
        options : list of str
            Options of NVRTC.

        Raises
        ------
        CompileError
            If the source does not compile, or a kernel has another mangled name here.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"module.cu", 0, None, None
        )
        try:
            for expression in kernels.values():
                self._call("nvrtcAddNameExpression", program, expression.encode())
            words = [f"--gpu-architecture=sm_{arch}", *options]
            array = (ctypes.c_char_p * len(words))(*[word.encode() for word in words])
            status = self._library.nvrtcCompileProgram(program, len(words), array)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                reason = self._library.nvrtcGetErrorString(status).decode()
                raise CompileError(log.strip() or f"nvrtc: error: {reason}")
            if log.strip():
                print(log.strip())
            self._check_names(program, kernels)
            return self._bytes(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _check_names(self, program: ctypes.c_void_p, kernels: dict[str, str]) -> None:
        for mangled, expression in kernels.items():
            lowered = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(lowered))
            if lowered.value != mangled.encode():
                raise CompileError(
                    f"error: {expression} is {(lowered.value or b'').decode()} here and {mangled} "
                    "in the host part"
                )

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            reason = self._library.nvrtcGetErrorString(status).decode()
            raise CompileError(f"{name}: error: {reason}")


def container(cubins: dict[str, bytes]) -> bytes:
    """Cubins by architecture, laid out as nvcc lays them out in a library."""
    entries = b""
    for arch, cubin in cubins.items():
        number, suffix = re.fullmatch(r"(\d+)([af]?)", arch).groups()  # type: ignore[union-attr]
        cubin += bytes(-len(cubin) % 16)
        header = bytearray(ENTRY_HEADER)
        struct.pack_into("<HHIQ", header, 0, KIND_CUBIN, 1, ENTRY_HEADER, len(cubin))
        struct.pack_into("<I", header, 28, int(number))
        struct.pack_into("<Q", header, 40, SUFFIX_FLAGS[suffix])
        entries += header + cubin
    return struct.pack("<IHHQ", CONTAINER_MAGIC, 1, CONTAINER_HEADER, len(entries)) + entries


def with_cubins(host: bytes, cubins: dict[str, bytes]) -> bytes:
    """A module: its host part and its cubins; the host part alone where it has no kernels."""
    if not cubins:
        return host
    host += bytes(-len(host) % 16)
    return host + container(cubins) + struct.pack("<Q", len(host)) + MAGIC


def unpacked(archive: str, offset: str, size: str) -> bytes:
    """A file of an archive.

    Raises
    ------
    OSError, lzma.LZMAError
        If the archive cannot be read or unpacked.
    """
    with lzma.open(archive) as file:
        return file.read()[int(offset) :][: int(size)]


def main(arguments: list[str]) -> int:
    words, _, options = (
        (arguments[: arguments.index("--")], "--", arguments[arguments.index("--") + 1 :])
        if "--" in arguments
        else (arguments, "", [])
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvrtc")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--host", nargs=3)
    parser.add_argument("--source", action="append", default=[])
    parser.add_argument("--arch", action="append", default=[])
    parser.add_argument("--kernels", default="{}")
    parser.add_argument("--cubin", nargs=2, action="append", default=[])
    parser.add_argument("--packed-cubin", nargs=4, action="append", default=[])
    parser.add_argument("--out")
    given = parser.parse_args(words)
    try:
        if given.version:
            print(Compiler(given.nvrtc).version())
            return 0
        cubins: dict[str, bytes] = {}
        kernels = json.loads(given.kernels)
        if kernels:
            compiler = Compiler(given.nvrtc)
            text = "".join(f'#include "{source}"\n' for source in given.source)
            for arch in given.arch:
                cubins[arch] = compiler.cubin(text, arch, kernels, options)
        for arch, path in given.cubin:
            with open(path, "rb") as file:
                cubins[arch] = file.read()
        for arch, *place in given.packed_cubin:
            cubins[arch] = unpacked(*place)
        module = with_cubins(unpacked(*given.host), cubins)
        with open(f"{given.out}.tmp", "wb") as file:
            file.write(module)
        os.chmod(f"{given.out}.tmp", 0o755)
        os.replace(f"{given.out}.tmp", given.out)
    except CompileError as error:
        print(error)
        return 1
    except (OSError, lzma.LZMAError) as error:
        print(f"nvrtc_compile: error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
