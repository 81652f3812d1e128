"""Facts about the CUDA devices of this machine, asked once per device and remembered.

Nothing here touches CUDA before a function is called. A function that reports a fact raises where
there is no device to ask; a predicate (``is_sm90a_supported`` and friends) answers False there, so
that tests can skip on it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

Device = torch.device | str | int
Capability = int | tuple[int, int]

# Keyed by what callers pass in hot paths (``tensor.device``, which carries its index), so that a
# repeated question is one dictionary look-up. "cuda" without an index is never a key: it means the
# current device, which changes.
_CAPABILITIES: dict[torch.device, tuple[int, int]] = {}


def as_number(cc: Capability) -> int:
    """90 for 90 or (9, 0)."""
    if isinstance(cc, tuple) and len(cc) == 2 and all(isinstance(part, int) for part in cc):
        return 10 * cc[0] + cc[1]
    if isinstance(cc, bool) or not isinstance(cc, int):
        raise TypeError(
            "a compute capability must be an integer such as 90, or a pair such as (9, 0), got "
            f"{type(cc).__name__} {cc!r}"
        )
    if cc < 10:
        raise ValueError(f"a compute capability is written as 10 * major + minor, got {cc}")
    return cc


def get_device_index(device: Device) -> int:
    """Index of a CUDA device.

    Parameters
    ----------
    device : torch.device, str or int
        ``torch.device("cuda", 1)``, ``"cuda:1"``, ``1``, or ``"cuda"`` for the current device.

    Returns
    -------
    int
        The index that ``torch.cuda`` functions take.

    Raises
    ------
    TypeError, ValueError
        If ``device`` is of another type, is not a CUDA device or has no such index on this machine.
    RuntimeError
        If no CUDA device is visible.
    """
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device must be a torch.device, a string or an index, got {device!r}")
    index: int | None
    if isinstance(device, int):
        index = device
    else:
        try:
            parsed = torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"device must name a CUDA device such as 'cuda:0', got {device!r}"
            ) from error
        if parsed.type != "cuda":
            raise ValueError(
                f"device must be a cuda device such as 'cuda' or 'cuda:0', got {str(device)!r}"
            )
        index = parsed.index
    count = torch.cuda.device_count()
    if count == 0:
        built = "is built without CUDA" if torch.version.cuda is None else "finds no usable GPU"
        raise RuntimeError(f"no CUDA device is visible to this process: this PyTorch {built}")
    if index is None:
        return torch.cuda.current_device()
    if not 0 <= index < count:
        raise ValueError(f"device index must be in [0, {count}), got {index}")
    return index


def get_compute_capability(device: Device) -> tuple[int, int]:
    """Compute capability ``(major, minor)`` of a CUDA device, for example ``(9, 0)`` for an H200.

    Parameters
    ----------
    device : torch.device, str or int
        As for :func:`get_device_index`, which also says what is raised.
    """
    known = _CAPABILITIES.get(device) if type(device) is torch.device else None
    if known is not None:
        return known
    index = get_device_index(device)
    key = torch.device("cuda", index)
    if key not in _CAPABILITIES:
        major, minor = torch.cuda.get_device_capability(index)
        _CAPABILITIES[key] = (major, minor)
    return _CAPABILITIES[key]


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def get_device_properties(device: Device) -> Any:
    """The properties object that PyTorch reports for a CUDA device."""
    return _properties(get_device_index(device))


def get_gpu_memory_bandwidth(device: Device) -> float:
    """Peak bandwidth of a device's memory in GB/s: two transfers a clock on the whole bus.

    Parameters
    ----------
    device : torch.device, str or int
        As for :func:`get_device_index`, which also says what is raised.
    """
    import pynvml

    properties = get_device_properties(device)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
        megahertz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        bits = pynvml.nvmlDeviceGetMemoryBusWidth(handle)
    finally:
        pynvml.nvmlShutdown()
    return 2 * megahertz * 1e6 * bits / 8 / 1e9


def get_device_name(device: Device) -> str:
    """Marketing name of a CUDA device, for example ``"NVIDIA H200"``."""
    return get_device_properties(device).name


def get_device_sm_count(device: Device) -> int:
    """Number of streaming multiprocessors of a CUDA device."""
    return get_device_properties(device).multi_processor_count


def get_shared_bytes_per_block_optin(device: Device) -> int:
    """Shared memory in bytes that one CTA may use after opting in."""
    return get_device_properties(device).shared_memory_per_block_optin


def device_support_pdl(device: Device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0 and later).

    False for the CPU, where the reference backend runs the same serving code.
    """
    is_elsewhere = isinstance(device, torch.device) and device.type != "cuda"
    return not is_elsewhere and get_compute_capability(device)[0] >= 9


def _cuda_at_least(major: int, minor: int) -> bool:
    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split(".")[:2])) >= (major, minor)


def _capability_or_none(device: Device) -> tuple[int, int] | None:
    # device_count() creates no CUDA context, so asking a predicate on a machine without GPU stays
    # harmless.
    return get_compute_capability(device) if torch.cuda.device_count() > 0 else None


def _has_major(device: Device, major: int) -> bool:
    capability = _capability_or_none(device)
    return capability is not None and capability[0] == major


def is_sm90a_supported(device: Device) -> bool:
    """Hopper (9.x) with CUDA 12.3 or later, the first to compile for ``sm_90a``."""
    return _has_major(device, 9) and _cuda_at_least(12, 3)


def is_sm100a_supported(device: Device) -> bool:
    """Data-centre Blackwell (10.x) with CUDA 12.8 or later."""
    return _has_major(device, 10) and _cuda_at_least(12, 8)


def is_sm100f_supported(device: Device) -> bool:
    """Data-centre Blackwell (10.x) with CUDA 12.9 or later, which has the target ``sm_100f``."""
    return _has_major(device, 10) and _cuda_at_least(12, 9)


def is_sm110a_supported(device: Device) -> bool:
    """Thor (11.x) with CUDA 13.0 or later."""
    return _has_major(device, 11) and _cuda_at_least(13, 0)


def is_sm120a_supported(device: Device) -> bool:
    """Compute capability 12.0 exactly with CUDA 12.8 or later."""
    return _capability_or_none(device) == (12, 0) and _cuda_at_least(12, 8)


def is_sm120f_supported(device: Device) -> bool:
    """The family 12.x with CUDA 12.9 or later, which has family targets such as ``sm_120f``."""
    return is_sm12x_supported(device) and _cuda_at_least(12, 9)


def is_sm121a_supported(device: Device) -> bool:
    """Compute capability 12.1 exactly with CUDA 12.9 or later."""
    return _capability_or_none(device) == (12, 1) and _cuda_at_least(12, 9)


def is_sm12x_supported(device: Device) -> bool:
    """Any device of the family 12.x with CUDA 12.8 or later."""
    return _has_major(device, 12) and _cuda_at_least(12, 8)
