"""Streams on partitions of a GPU's multiprocessors, by the driver's green contexts.

Kernels on such a stream run on its partition alone, so that two operations share a GPU without
taking turns. Planners see the partition: :meth:`plan` of an attention wrapper divides work for the
multiprocessors of the current stream.

Contexts and streams live as long as the process: PyTorch's allocator and captured graphs keep
streams for longer than their users do. Make them once.

Source: CUDA Driver API, "Green Contexts".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._common import driver
from ._common.arch import get_compute_capability, get_device_index
from ._common.driver import CUdevResource
from ._instrument.decorator import flashinfer_api

__all__ = [
    "create_green_ctx_streams",
    "get_cudevice",
    "get_device_resource",
    "get_sm_count_constraint",
    "split_device_green_ctx",
    "split_device_green_ctx_by_sm_count",
    "split_resource",
    "split_resource_by_sm_count",
]


def get_sm_count_constraint(major: int, minor: int) -> tuple[int, int]:
    """Smallest partition of an architecture, and what its size is a multiple of.

    Parameters
    ----------
    major, minor : int
        Compute capability.

    Returns
    -------
    (least, multiple) : tuple of int

    Raises
    ------
    ValueError
        If `major` is below 7.
    """
    if major < 7:
        raise ValueError(f"major must be 7 or more, got compute capability {major}.{minor}")
    return {7: (2, 2), 8: (4, 2)}.get(major, (8, 8))


def get_cudevice(dev: torch.device) -> int:
    """The driver's handle of a device, which is initialised if need be.

    Parameters
    ----------
    dev : torch.device
        A CUDA device.

    Raises
    ------
    TypeError, ValueError
        If `dev` is not one.
    RuntimeError
        If no CUDA device is visible.
    """
    index = get_device_index(dev)
    torch.cuda.synchronize(index)  # a green context needs the primary context
    return index  # the driver numbers the visible devices as PyTorch does


def get_device_resource(cu_dev: int) -> CUdevResource:
    """All multiprocessors of a device: ``sm.smCount`` of them.

    Parameters
    ----------
    cu_dev : int
        The device, as :func:`get_cudevice` returns it.

    Raises
    ------
    RuntimeError
        If the driver is older than CUDA 12.4 or refuses.
    """
    return driver.sm_resource(cu_dev)


def split_resource(
    resource: CUdevResource, num_groups: int, min_count: int
) -> tuple[list[CUdevResource], CUdevResource]:
    """Cut groups of equal size from the multiprocessors of a device.

    Parameters
    ----------
    resource : CUdevResource
        What :func:`get_device_resource` returns; parts of a split cannot be split again.
    num_groups : int
        Number of groups, at least 1.
    min_count : int
        Multiprocessors of a group, at least 1; rounded up as
        :func:`get_sm_count_constraint` says.

    Returns
    -------
    (groups, remaining)
        A list of `num_groups` resources, and the rest.

    Raises
    ------
    ValueError
        If a number is below 1.
    RuntimeError
        If there are not as many multiprocessors.
    """
    for name, value in (("num_groups", num_groups), ("min_count", min_count)):
        _check_count(name, value)
    try:
        groups, remaining = driver.split(resource, num_groups, min_count)
    except RuntimeError as error:
        if "RESOURCE" not in str(error):
            raise
        groups, reason = [], f" ({error})"
    else:
        reason = ""
    if len(groups) < num_groups:
        raise RuntimeError(
            f"{num_groups} groups of {min_count} SMs cannot be cut from {resource.sm.smCount}: "
            f"ask for fewer groups or smaller ones{reason}"
        )
    return groups, remaining


def split_resource_by_sm_count(
    cu_dev: int, resource: CUdevResource, sm_counts: Sequence[int]
) -> tuple[list[CUdevResource], CUdevResource]:
    """Cut groups of given sizes from the multiprocessors of a device.

    Parameters
    ----------
    cu_dev : int
        The device, as :func:`get_cudevice` returns it.
    resource : CUdevResource
        Its multiprocessors, as :func:`get_device_resource` returns them.
    sm_counts : list of int
        Multiprocessors of each group, at least 1; rounded up as :func:`get_sm_count_constraint`
        says.

    Returns
    -------
    (groups, remaining)
        A resource for each size, and the rest.

    Raises
    ------
    ValueError
        If `sm_counts` is empty or a size is below 1.
    RuntimeError
        If the rounded sizes are more than there are.
    """
    counts = list(sm_counts)
    if not counts:
        raise ValueError("sm_counts must have at least one size, got none")
    for index, count in enumerate(counts):
        _check_count(f"sm_counts[{index}]", count)
    least, multiple = get_sm_count_constraint(*get_compute_capability(cu_dev))
    rounded = [max(least, -(-count // multiple) * multiple) for count in counts]
    if sum(rounded) > resource.sm.smCount:
        raise RuntimeError(
            f"groups of {counts} SMs, rounded up to {rounded}, cannot be cut from "
            f"{resource.sm.smCount}: ask for fewer or smaller ones"
        )
    groups, remaining = [], resource
    for index, count in enumerate(rounded):
        if index:
            # The driver splits what a context has, and no part of an earlier split.
            remaining = driver.resource_of(driver.green_context(cu_dev, remaining))
        (group,), remaining = split_resource(remaining, 1, count)
        groups.append(group)
    return groups, remaining


def create_green_ctx_streams(
    cu_dev: int, resources: Sequence[CUdevResource]
) -> list[torch.cuda.ExternalStream]:
    """A stream on each of some partitions.

    Parameters
    ----------
    cu_dev : int
        The device, as :func:`get_cudevice` returns it.
    resources : list of CUdevResource
        Parts of one split, or of several.

    Returns
    -------
    list of torch.cuda.ExternalStream
        For ``torch.cuda.stream``. They do not wait for the default stream.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    contexts = [driver.green_context(cu_dev, resource) for resource in resources]
    device = torch.device("cuda", cu_dev)
    return [torch.cuda.ExternalStream(driver.stream_of(c), device=device) for c in contexts]


@flashinfer_api
def split_device_green_ctx(
    dev: torch.device, num_groups: int, min_count: int
) -> tuple[list[torch.cuda.ExternalStream], list[CUdevResource]]:
    """Streams on groups of equal size, and one on the rest of the device.

    Parameters
    ----------
    dev : torch.device
        A CUDA device.
    num_groups : int
        Number of groups, at least 1.
    min_count : int
        Multiprocessors of a group, at least 1; rounded up as
        :func:`get_sm_count_constraint` says.

    Returns
    -------
    (streams, resources)
        Lists of the groups' streams and multiprocessors (``resource.sm.smCount``). The last of
        each is of the rest; without a rest it is left out.

    Raises
    ------
    TypeError, ValueError
        If `dev` is no CUDA device, or a number is below 1.
    RuntimeError
        If there are not as many multiprocessors, or the driver is older than CUDA 12.4.
    """
    cu_dev = get_cudevice(dev)
    groups, remaining = split_resource(get_device_resource(cu_dev), num_groups, min_count)
    return _with_rest(cu_dev, groups, remaining)


@flashinfer_api
def split_device_green_ctx_by_sm_count(
    dev: torch.device, sm_counts: list[int]
) -> tuple[list[torch.cuda.ExternalStream], list[CUdevResource]]:
    """Streams on groups of given sizes, and one on the rest of the device.

    Parameters
    ----------
    dev : torch.device
        A CUDA device.
    sm_counts : list of int
        Multiprocessors of each group, at least 1; rounded up as :func:`get_sm_count_constraint`
        says.

    Returns
    -------
    (streams, resources)
        As of :func:`split_device_green_ctx`.

    Raises
    ------
    TypeError, ValueError
        If `dev` is no CUDA device, `sm_counts` is empty, or a size is below 1.
    RuntimeError
        If the rounded sizes are more than there are, or the driver is older than CUDA 12.4.
    """
    cu_dev = get_cudevice(dev)
    groups, remaining = split_resource_by_sm_count(cu_dev, get_device_resource(cu_dev), sm_counts)
    return _with_rest(cu_dev, groups, remaining)


def _with_rest(
    cu_dev: int, groups: list[CUdevResource], remaining: CUdevResource
) -> tuple[list[torch.cuda.ExternalStream], list[CUdevResource]]:
    resources = [*groups, *([remaining] if remaining.sm.smCount else [])]
    return create_green_ctx_streams(cu_dev, resources), resources


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
