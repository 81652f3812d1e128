"""A report of what matters for running and compiling: versions, GPUs, toolchain, cache, variables.

Everything is asked without creating a CUDA context and without compiling anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import env, version
from .compilation_context import CompilationContext
from .jit import env as jit_env
from .jit import host_parts, nvrtc, toolchain

# Distributions whose versions decide how FlashInfer behaves.
PACKAGES = (
    "torch",
    "apache-tvm-ffi",
    "ninja",
    "numpy",
    "nvidia-ml-py",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cutlass",
    "cupti-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
)


def collect_env() -> dict[str, dict[str, Any]]:
    """Collect the report.

    Returns
    -------
    dict of str to dict
        The sections are `flashinfer`, `system`, `packages`, `gpu`, `toolchain`, `cache` and
        `variables`. All values can be written as JSON. A missing value is None, or a text that
        says why it is missing.
        A part that fails is a text that begins with ``broken:``.
    """
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "flashinfer": _flashinfer,
        "system": _system,
        "packages": lambda: {name: _or_broken(_version, name) for name in PACKAGES},
        "gpu": _gpu,
        "toolchain": _toolchain,
        "cache": _cache,
        "variables": _variables,
    }
    report = {title: _or_broken(collect) for title, collect in sections.items()}
    return {t: part if isinstance(part, dict) else {"all": part} for t, part in report.items()}


def _or_broken(collect: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a function, or a line about its failure.

    A report is read where something does not work: one broken part must not hide the others.
    """
    try:
        return collect(*arguments)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return f"broken: {type(error).__name__}: {lines[0]}"


def _variables() -> dict[str, str]:
    """The declared variables that are set, as they stand, without folders of the user."""
    text = env.child_environment()
    private = ("HOME", "PATH")
    return {n: text[n] for n, v in env.VARIABLES.items() if v.is_set() and n not in private}


def _flashinfer() -> dict[str, Any]:
    return {
        "version": version.__version__,
        "commit": version.__git_version__,
        "location": str(Path(__file__).resolve().parent),
    }


def _system() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "os": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"driver": None, "devices": [], "note": f"no NVIDIA driver: {error}"}
    try:
        devices = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
            name = pynvml.nvmlDeviceGetName(handle)
            devices.append(f"{index}: {name}, {major}.{minor}, {memory:.0f} GiB")
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "devices": devices,
        }
    except pynvml.NVMLError as error:
        return {"driver": None, "devices": [], "note": f"NVML failed: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _toolchain() -> dict[str, Any]:
    described = _or_broken(toolchain.describe)
    if not isinstance(described, dict):
        described = {"programs": described}
    found: dict[str, Any] = {}
    for what, value in described.items():
        if isinstance(value, dict):
            folder = f", toolkit {value['root']}" if "root" in value else ""
            found[what] = f"{value.get('nvcc') or value.get('path')}: {value['version']}{folder}"
        else:
            found[what] = value
    return found | {"nvrtc": _or_broken(_nvrtc), "targets": _or_broken(_targets)}


def _nvrtc() -> str:
    """The NVRTC library, and how many modules it can compile."""
    parts = host_parts.read_index(host_parts.folder()).parts
    served = f"{len(parts)} host parts in {host_parts.folder()}"
    path = nvrtc.library()
    return f"{path}: {toolchain.nvrtc_version(path)}, {served}" if path else f"none, {served}"


def _targets() -> str | None:
    targets = CompilationContext().TARGET_CUDA_ARCHS
    return " ".join(f"{major}.{minor}" for major, minor in sorted(targets)) or None


def _cache() -> dict[str, Any]:
    folders = {
        "base": "FLASHINFER_BASE_DIR",
        "modules": "FLASHINFER_JIT_DIR",
        "include": "FLASHINFER_INCLUDE_DIR",
        "csrc": "FLASHINFER_CSRC_DIR",
        "prebuilt": "FLASHINFER_AOT_DIR",
        "cubins": "FLASHINFER_CUBIN_DIR",
    }
    found = {what: _or_broken(getattr, jit_env, name) for what, name in folders.items()}
    report = {what: str(folder) if folder else None for what, folder in found.items()}
    return report | {"jit_cache_package": _or_broken(jit_env.has_flashinfer_jit_cache)}
