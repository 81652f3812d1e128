"""Which GPU architectures modules are compiled for.

The list comes from ``FLASHINFER_CUDA_ARCH_LIST`` or else from the GPUs that are visible. GPUs
are asked through NVML, which, unlike the CUDA runtime, creates no context.
"""

from __future__ import annotations

import functools
import re
import sys

from . import env

Arch = tuple[int, str]  # (9, "0a") is sm_90a

_ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)")
# Minor versions by major, of every compute capability that nvcc 11 to 13 knows and of 10.7.
_EXISTING = {
    3: "57", 5: "023", 6: "012", 7: "025", 8: "06789", 9: "0", 10: "0137", 11: "0", 12: "01",
}  # fmt: skip
_FIRST_WITH_SUFFIX = {"a": 9, "f": 10}

NO_ARCH_MESSAGE = (
    "No GPU was found to compile for: set FLASHINFER_CUDA_ARCH_LIST to the architectures you "
    'want, for example FLASHINFER_CUDA_ARCH_LIST="9.0a" for H100/H200.'
)


class NoTargetError(RuntimeError):
    """None of the targets is one that a kernel is written for."""


class CompilationContext:
    """The target architectures and the nvcc flags that select them.

    Attributes
    ----------
    TARGET_CUDA_ARCHS : set of (int, str)
        Such as ``{(8, "0"), (9, "0a")}``. Looked up on each access, unless it was assigned.
    """

    def __init__(self) -> None:
        self._assigned: set[Arch] | None = None

    @property
    def TARGET_CUDA_ARCHS(self) -> set[Arch]:
        if self._assigned is not None:
            return self._assigned
        text = env.FLASHINFER_CUDA_ARCH_LIST.get()
        return set(parse_arch_list(text) if text else _detect(env.CUDA_VISIBLE_DEVICES.get()))

    @TARGET_CUDA_ARCHS.setter
    def TARGET_CUDA_ARCHS(self, archs: set[Arch]) -> None:
        self._assigned = set(archs)

    @staticmethod
    def _normalize_cuda_arch(major: int, minor: int) -> Arch:
        """Target of a GPU; vLLM names it when it says what FlashInfer was compiled for."""
        return arch_of_capability(major, minor)

    def reset(self) -> None:
        """Forget assigned targets: they are those of the environment again."""
        self._assigned = None
        _ask_torch.cache_clear()
        _ask_nvml.cache_clear()

    def get_nvcc_flags_list(
        self, supported_major_versions: list[int] | None = None, map_sm107_to_100f: bool = False
    ) -> list[str]:
        """The ``-gencode`` flags for the targets that a kernel supports.

        Parameters
        ----------
        supported_major_versions : list of int, optional
            Major compute capabilities the kernel is written for; all by default.
        map_sm107_to_100f : bool
            Compile for ``sm_100f``, the family target, where the target is SM107.

        Raises
        ------
        RuntimeError
            If there is no target at all, or none with one of these major versions.
        """
        archs = self.TARGET_CUDA_ARCHS
        if not archs:
            raise RuntimeError(NO_ARCH_MESSAGE)
        if supported_major_versions is not None:
            archs = {arch for arch in archs if arch[0] in supported_major_versions}
            if not archs:
                raise NoTargetError(
                    "No supported CUDA architectures found for major versions "
                    f"{list(supported_major_versions)}. "
                    f"The targets are {sorted(map(_dotted, self.TARGET_CUDA_ARCHS))}; "
                    "FLASHINFER_CUDA_ARCH_LIST changes them."
                )
        numbers = {f"{major}{minor}" for major, minor in archs}
        if map_sm107_to_100f:
            numbers = {"100f" if n.rstrip("af") == "107" else n for n in numbers}
        return [f"-gencode=arch=compute_{n},code=sm_{n}" for n in sorted(numbers, key=_by_number)]


current_compilation_context = CompilationContext()


def parse_arch_list(text: str) -> list[Arch]:
    """Parse ``"8.0 9.0a 12.0f"`` (spaces, commas or semicolons between the entries).

    Raises
    ------
    ValueError
        If an entry is not of the form ``major.minor`` with an optional ``a`` or ``f``, or names
        an architecture that does not exist.
    """
    archs = []
    for word in re.split(r"[\s,;]+", text.strip()):
        match = _ARCH.fullmatch(word)
        if match is None:
            raise ValueError(
                f"FLASHINFER_CUDA_ARCH_LIST={text!r}: {word!r} is not an architecture; "
                'expected entries such as "8.0", "9.0a" or "12.0f"'
            )
        major, minor, suffix = int(match[1]), match[2], match[3]
        if minor not in _EXISTING.get(major, "") or major < _FIRST_WITH_SUFFIX.get(suffix, 0):
            raise ValueError(
                f"FLASHINFER_CUDA_ARCH_LIST={text!r}: there is no architecture {word}; "
                f"expected some of {', '.join(_known_archs())}"
            )
        archs.append((major, minor + suffix))
    return archs


def _known_archs() -> list[str]:
    """Architectures from 7.5 on as they are usually written."""
    numbers = [(major, int(m)) for major, minors in _EXISTING.items() for m in minors]
    return [_dotted(arch_of_capability(*number)) for number in numbers if number >= (7, 5)]


def arch_of_capability(major: int, minor: int) -> Arch:
    """Target of a GPU: from SM90 on, the architecture-specific variant (suffix ``a``)."""
    return major, f"{minor}a" if major >= 9 else str(minor)


def _detect(visible: str) -> frozenset[Arch]:
    """Architectures of the visible GPUs; empty without a driver."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # The caller already owns a context, so this costs nothing, where NVML takes some 20 ms. It
        # also knows better: there are GPUs without NVML, and indices that NVML counts otherwise.
        return _ask_torch()
    return _ask_nvml(visible)


@functools.cache
def _ask_torch() -> frozenset[Arch]:
    import torch

    count = torch.cuda.device_count()
    return frozenset(arch_of_capability(*torch.cuda.get_device_capability(i)) for i in range(count))


@functools.cache
def _ask_nvml(visible: str) -> frozenset[Arch]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return frozenset()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        handles = _visible_handles(pynvml, handles, visible)
        found = [pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
    except pynvml.NVMLError:
        return frozenset()
    finally:
        pynvml.nvmlShutdown()
    return frozenset(arch_of_capability(major, minor) for major, minor in found)


def _visible_handles(pynvml, handles: list, visible: str) -> list:
    """Apply ``CUDA_VISIBLE_DEVICES``: indices or UUID prefixes, ending at the first bad entry."""
    if not visible.strip():
        return handles
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    chosen = []
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.isdigit() and int(entry) < len(handles):
            chosen.append(handles[int(entry)])
            continue
        matches = [
            h for h, uuid in zip(handles, uuids, strict=True) if entry and uuid.startswith(entry)
        ]
        if entry.startswith("MIG-"):  # a slice of some GPU here: which one does not matter
            matches = handles[:1]
        if not matches:
            break
        chosen.append(matches[0])
    return chosen


def _dotted(arch: Arch) -> str:
    return f"{arch[0]}.{arch[1]}"


def _by_number(number: str) -> tuple[int, str]:
    return int(number.rstrip("af")), number
