"""Types, pointers and layouts for calls of kernels in CuTe-DSL.

Functions that name types of the DSL import it when they are called.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .._common import checks
from .._common.arch import get_device_sm_count
from .availability import is_cute_dsl_available as is_cute_dsl_available

# The DSL's name of each torch dtype.
_TYPES = {
    torch.float32: "Float32",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
    torch.float8_e4m3fn: "Float8E4M3FN",
    torch.float8_e5m2: "Float8E5M2",
    torch.int8: "Int8",
    torch.int16: "Int16",
    torch.int32: "Int32",
    torch.int64: "Int64",
    torch.uint8: "Uint8",
}
# Names in strings: those of torch, and the DSL's formats that torch may not have.
_MORE_NAMES = {
    "float4_e2m1fn": "Float4E2M1FN",
    "float8_e8m0fnu": "Float8E8M0FNU",
    "uint32": "Uint32",
    "uint64": "Uint64",
}
_NAMES = {str(dtype).removeprefix("torch."): name for dtype, name in _TYPES.items()} | _MORE_NAMES


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return (a + b - 1) // b


def get_cutlass_dtype(dtype: str) -> Any:
    """The DSL's type of a name such as ``"bfloat16"`` or ``"float4_e2m1fn"``.

    Raises
    ------
    ValueError
        If there is none.
    """
    name = _NAMES[checks.choice("dtype", dtype, tuple(_NAMES))]
    import cutlass

    return getattr(cutlass, name)


def torch_to_cutlass_dtype(dtype: torch.dtype) -> Any:
    """The DSL's type of a torch dtype.

    Raises
    ------
    ValueError
        If there is none.
    """
    name = _TYPES[checks.dtype("dtype", dtype, tuple(_TYPES))]
    import cutlass

    return getattr(cutlass, name)


torch_dtype_to_cutlass = torch_to_cutlass_dtype


def cutlass_to_torch_dtype(cutlass_dtype: Any) -> torch.dtype:
    """The torch dtype of one of the DSL's types.

    Raises
    ------
    ValueError
        If torch has none.
    """
    name = getattr(cutlass_dtype, "__name__", str(cutlass_dtype))
    found = next((dtype for dtype, known in _TYPES.items() if known == name), None)
    if found is None:
        known = ", ".join(_TYPES.values())
        raise ValueError(f"`cutlass_dtype` must be one of {known}, got {name}")
    return found


def get_num_sm(device: torch.device) -> int:
    """Number of SMs of a GPU."""
    return get_device_sm_count(device)


def current_cuda_stream() -> Any:
    """PyTorch's current stream as the DSL takes it."""
    import cuda.bindings.driver as cuda

    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


def get_hardware_info() -> Any:
    """The DSL's object of facts about the current GPU."""
    import cutlass

    return cutlass.utils.HardwareInfo()


def get_max_active_clusters(cluster_size: int) -> int:
    """Clusters of so many CTAs that the current GPU runs at a time."""
    return int(get_hardware_info().get_max_active_clusters(cluster_size))


def make_ptr(
    dtype: Any,
    value: int | ctypes._Pointer,
    mem_space: Any = None,
    assumed_align: int | None = None,
) -> Any:
    """A typed pointer to pass to a kernel.

    Parameters
    ----------
    dtype : type
        The DSL's type of what it points to.
    value : int or ctypes pointer
        The address.
    mem_space : cute.AddressSpace, optional
        Kind of memory; generic by default.
    assumed_align : int, optional
        Bytes of which the address is a multiple; those of the type by default.

    Raises
    ------
    TypeError
        If `value` is no address.
    ValueError
        If it is not aligned as assumed.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr as make_dsl_ptr

    if isinstance(value, ctypes._Pointer):
        value = ctypes.cast(value, ctypes.c_void_p).value or 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`value` must be an int or a ctypes pointer, got {type(value).__name__}")
    align = assumed_align or max(1, dtype.width // 8)
    if value % align:
        raise ValueError(f"`value` must be a multiple of {align}, got {value:#x}")
    space = cute.AddressSpace.generic if mem_space is None else mem_space
    return make_dsl_ptr(dtype, value, space, assumed_align=align)


# ---- scale factors of block-scaled products ----
# An atom of 128 rows and 4 scales: rows 32 apart share a line of 16 bytes.


def get_mma_sf_shape(
    m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16
) -> tuple[int, int, int, int, int, int]:
    """Shape of the scales as the MMA reads them: ``(32, 4, m / 128, 4, k / (4 vec), groups)``.

    Sizes are rounded up to whole atoms of 128 rows and 4 scales.
    """
    return 32, 4, ceil_div(m, 128), 4, ceil_div(k, 4 * sf_vec_size), num_groups


def convert_sf_to_mma_layout(
    sf: torch.Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16
) -> torch.Tensor:
    """Scales in the swizzled layout of 128x4 as a view of six dimensions; nothing is copied.

    Parameters
    ----------
    sf : torch.Tensor
        Contiguous scales of `num_groups` matrices in atoms of 512, as `nvfp4_quantize` writes them.
    m, k : int
        Rows, and elements of a row.
    num_groups : int
        Matrices.
    sf_vec_size : int
        Elements that share a scale.

    Returns
    -------
    torch.Tensor
        The shape of `get_mma_sf_shape`.

    Raises
    ------
    ValueError
        If `sf` has not as many elements as that, or is not contiguous.
    """
    rows, quarters, tiles_m, four, tiles_k, groups = get_mma_sf_shape(m, k, num_groups, sf_vec_size)
    checks.contiguous("sf", sf)
    wanted = rows * quarters * tiles_m * four * tiles_k * groups
    if sf.numel() != wanted:
        raise ValueError(f"`sf` must have {wanted} elements, got {sf.numel()}")
    atoms = sf.view(groups, tiles_m, tiles_k, rows, quarters, four)
    return atoms.permute(3, 4, 1, 5, 2, 0)


def convert_sf_from_mma_layout(
    sf_6d: torch.Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16
) -> torch.Tensor:
    """The scales of `convert_sf_to_mma_layout` as rows again, ``[groups * rows, scales of a row]``.

    Rows and scales are those of whole atoms, in the swizzled order.
    """
    shape = get_mma_sf_shape(m, k, num_groups, sf_vec_size)
    if tuple(checks.tensor("sf_6d", sf_6d).shape) != shape:
        raise ValueError(f"`sf_6d` must have shape {list(shape)}, got {list(sf_6d.shape)}")
    atoms = sf_6d.permute(5, 2, 4, 0, 1, 3).contiguous()
    return atoms.view(num_groups * shape[2] * 128, shape[4] * 4)
