"""Whether the CuTe-DSL compiler is installed and what it compiles for. Nothing imports it."""

from __future__ import annotations

import torch

from .._common.arch import get_compute_capability
from ..jit import cute_dsl

# Compute capabilities that kernels of this package are written for, and those of the DSL.
_NATIVE = frozenset({(9, 0)})
_TARGETS = frozenset(
    {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)}
)


def is_cute_dsl_available() -> bool:
    """Whether nvidia-cutlass-dsl is installed. What is compiled already runs without it."""
    return cute_dsl.find() is not None


def is_rubin_cute_dsl_available() -> bool:
    """Whether kernels for compute capability 10.7 are there: none is written."""
    return False


def is_cute_dsl_experimental_available() -> bool:
    """Whether the installed DSL has its experimental modules."""
    dsl = cute_dsl.find()
    return dsl is not None and dsl.has_module("cutlass/cute/experimental")


def is_cute_dsl_arch_supported(major: int, minor: int, native_only: bool = False) -> bool:
    """Whether the installed DSL compiles for a compute capability.

    Parameters
    ----------
    major, minor : int
        The compute capability.
    native_only : bool
        Whether kernels of this package are written for it, too.
    """
    wanted = (major, minor)
    return is_cute_dsl_available() and wanted in (_NATIVE if native_only else _TARGETS)


def cute_dsl_compile_arch(major: int, minor: int) -> str:
    """The DSL's name of a compute capability, such as ``sm_90a``.

    Raises
    ------
    ValueError
        If the DSL does not compile for it.
    """
    if (major, minor) not in _TARGETS:
        known = ", ".join(f"{a}.{b}" for a, b in sorted(_TARGETS))
        raise ValueError(f"`major`, `minor` must be one of {known}, got {major}.{minor}")
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def require_cute_dsl_arch(device: torch.device | str | int, native_only: bool = False) -> None:
    """Raise unless the DSL is installed and compiles for a GPU.

    Parameters
    ----------
    device : torch.device, str or int
        The GPU.
    native_only : bool
        As for `is_cute_dsl_arch_supported`.

    Raises
    ------
    flashinfer.jit.ToolchainError
        If nvidia-cutlass-dsl is not installed.
    RuntimeError
        If it does not compile for the GPU, or no kernel is written for it.
    """
    cute_dsl.require()
    major, minor = get_compute_capability(torch.device(device))
    if not is_cute_dsl_arch_supported(major, minor, native_only):
        raise RuntimeError(
            f"`device` must be of compute capability "
            f"{' or '.join(f'{a}.{b}' for a, b in sorted(_NATIVE if native_only else _TARGETS))} "
            f"for kernels in CuTe-DSL, got {major}.{minor}"
        )
