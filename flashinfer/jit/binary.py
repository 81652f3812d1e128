"""Reads a built module: architectures, resources and instructions of each kernel.

Reads the file itself: neither a GPU nor `cuobjdump` is needed. A shared library holds a fat binary
per translation unit: a header, then entries (device ELF, PTX) for the architectures asked for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
KIND_ELF = 2
# Bits of an entry's flags.
COMPRESSED = 0x2000 | 0x8000
ARCH_SPECIFIC = 1 << 20
FAMILY_SPECIFIC = 1 << 21

# Attributes in .nv.info whose value is (symbol index, number).
ATTRIBUTE_SIZED = 4
REGISTER_COUNT = 0x2F
FRAME_SIZE = 0x11
# In a kernel's own .nv.info: where the parameters end, a number in the place of a size, and of each
# parameter (zero, u16 ordinal, u16 offset, size and kind).
ATTRIBUTE_SHORT = 3
PARAMETERS_END = 0x19
PARAMETER = 0x17

SYMBOL_TABLE = 2


@dataclass(frozen=True)
class Kernel:
    """Resources of one kernel for one architecture.

    Attributes
    ----------
    name : str
        Mangled name.
    arch : str
        As nvcc spells it, e.g. `sm_90a`.
    registers : int
        32-bit registers per thread.
    stack_bytes : int
        Stack frame per thread. 0 means that nothing was spilled to local memory; more can be spills
        or an array that is indexed at run time.
    shared_bytes : int
        Static shared memory per CTA.
    parameter_bytes : int
        Parameters, from the first one's beginning on, with the gaps between them.
    """

    name: str
    arch: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    parameter_bytes: int = 0

    @property
    def short_name(self) -> str:
        """The function's own name, without namespace and template arguments."""
        return _unqualified(self.name)


def read_kernels(path: Path | str) -> list[Kernel]:
    """List the kernels in a shared library, object file or cubin container.

    Parameters
    ----------
    path : Path or str
        File that nvcc wrote.

    Returns
    -------
    list of Kernel
        In the order of the file. Empty if the file holds no device code.

    Raises
    ------
    ValueError
        If the device code is compressed (nvcc does so when asked with `--compress-mode=size`).
    """
    data = Path(path).read_bytes()
    kernels = []
    for arch, compressed, elf in device_elfs(data):
        if compressed:
            raise ValueError(
                f"{path}: device code for {arch} is compressed and cannot be read here"
            )
        kernels += _elf_kernels(elf, arch)
    return kernels


def read_opcodes(path: Path | str) -> dict[tuple[str, str], list[int]]:
    """List the instructions of each kernel by opcode.

    An instruction of compute capability 7.0 and later has 16 bytes, and its lowest 12 bits are the
    opcode: 0x23c is HMMA, 0xfae LDGSTS (cp.async), 0x83b LDSM (ldmatrix), 0x983 and 0x387 are LDL
    and STL (local memory).

    Parameters
    ----------
    path : Path or str
        File that nvcc wrote, as for :func:`read_kernels`.

    Returns
    -------
    dict of (str, str) to list of int
        Opcodes by mangled name and architecture, in the order of the code.
    """
    found = {}
    for arch, _, elf in device_elfs(Path(path).read_bytes()):
        for name, (*_, offset, size) in _sections(elf).items():
            if name.startswith(".text."):
                words = struct.unpack_from(f"<{size // 8}Q", elf, offset)
                found[name.removeprefix(".text."), arch] = [word & 0xFFF for word in words[::2]]
    return found


def read_code(path: Path | str) -> dict[tuple[str, str], bytes]:
    """Read the machine code of each kernel: its instructions, then the constants that they use.

    Parameters
    ----------
    path : Path or str
        File that nvcc wrote, as for :func:`read_kernels`.

    Returns
    -------
    dict of (str, str) to bytes
        Code by mangled name and architecture. The bytes hold neither names nor absolute addresses.
    """
    found = {}
    for arch, _, elf in device_elfs(Path(path).read_bytes()):
        sections = _sections(elf)
        for section, (*_, offset, size) in sections.items():
            if not section.startswith(".text."):
                continue
            name = section.removeprefix(".text.")
            # Bank 0 holds the parameters, which a launch writes.
            banks = [sections.get(f".nv.constant{i}.{name}") for i in range(1, 8)]
            constants = b"".join(elf[bank[4] : bank[4] + bank[5]] for bank in banks if bank)
            found[name, arch] = elf[offset : offset + size] + constants
    return found


def device_elfs(data: bytes) -> Iterator[tuple[str, bool, bytes]]:
    """(architecture, compressed, contents) of every device ELF."""
    start = 0
    while (container := data.find(FATBIN_MAGIC, start)) >= 0:
        header_size, size = struct.unpack_from("<HQ", data, container + 6)
        position = container + header_size
        start = end = position + size
        while position < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, position)
            (sm,) = struct.unpack_from("<I", data, position + 28)
            (flags,) = struct.unpack_from("<Q", data, position + 40)
            suffix = "a" if flags & ARCH_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
            position += entry_header
            if kind == KIND_ELF:
                yield (
                    f"sm_{sm}{suffix}",
                    bool(flags & COMPRESSED),
                    data[position : position + entry_size],
                )
            position += entry_size


def _sections(elf: bytes) -> dict[str, tuple[int, ...]]:
    """Section headers, (name offset, type, flags, address, offset, size), by name and in order."""
    (section_offset,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", elf, section_offset + i * entry_size) for i in range(count)
    ]
    names_offset = headers[names_index][4]
    return {_text(elf, names_offset + h[0]): h for h in headers}


def _elf_kernels(elf: bytes, arch: str) -> list[Kernel]:
    sections = _sections(elf)
    symbols = _symbol_names(elf, sections)
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    info = sections.get(".nv.info")
    for attribute, value in _attributes(elf, info) if info else ():
        table = {REGISTER_COUNT: registers, FRAME_SIZE: stack}.get(attribute)
        if table is not None and isinstance(value, bytes):
            symbol, number = struct.unpack("<II", value)
            table[symbols[symbol]] = number

    kernels = []
    for section in sections:
        # A kernel, unlike a device function, has a section of launch attributes of its own.
        name = section.removeprefix(".text.")
        own_info = sections.get(f".nv.info.{name}")
        if section.startswith(".text.") and own_info:
            shared = sections.get(f".nv.shared.{name}")
            kernels.append(
                Kernel(
                    name,
                    arch,
                    registers=registers.get(name, 0),
                    stack_bytes=stack.get(name, 0),
                    shared_bytes=shared[5] if shared else 0,
                    parameter_bytes=_parameter_bytes(elf, own_info),
                )
            )
    return kernels


def _symbol_names(elf: bytes, sections: dict[str, tuple[int, ...]]) -> list[str]:
    strings = sections[".strtab"][4]
    (table,) = (h for h in sections.values() if h[1] == SYMBOL_TABLE)
    offset, size = table[4], table[5]
    return [
        _text(elf, strings + struct.unpack_from("<I", elf, i)[0])
        for i in range(offset, offset + size, 24)
    ]


def _parameter_bytes(elf: bytes, info: tuple[int, ...]) -> int:
    begins, end = [], 0
    for attribute, value in _attributes(elf, info):
        if attribute == PARAMETERS_END and isinstance(value, int):
            end = value
        elif attribute == PARAMETER and isinstance(value, bytes):
            begins.append(struct.unpack_from("<H", value, 6)[0])
    # A bank of constants has other things before the parameters: the first one is aligned there.
    return end - min(begins, default=0)


def _attributes(elf: bytes, section: tuple[int, ...]) -> Iterator[tuple[int, bytes | int]]:
    """Attributes with their values: bytes of a size of their own, or a number of 16 bits."""
    position, end = section[4], section[4] + section[5]
    while position < end:
        form, attribute, short = struct.unpack_from("<BBH", elf, position)
        position += 4
        if form == ATTRIBUTE_SIZED:
            yield attribute, elf[position : position + short]
            position += short
        elif form == ATTRIBUTE_SHORT:
            yield attribute, short


def _text(elf: bytes, offset: int) -> str:
    return elf[offset : elf.index(b"\0", offset)].decode()


def _unqualified(mangled: str) -> str:
    """Last identifier of an Itanium-mangled name, e.g. `rmsnorm_kernel`; else the name itself."""
    match = re.match(r"_ZN?K?", mangled)
    rest, last = mangled[match.end() :] if match else "", mangled
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        last, rest = rest[length.end() : end], rest[end:]
    return last
