"""Small helpers under the names that serving engines import."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ._attention.backends import check_lse_base as check_lse_base
from ._attention.backends import check_lse_layout as check_lse_layout
from ._attention.backends import determine_attention_backend as determine_attention_backend
from ._attention.backends import is_cutlass_backend_supported as is_cutlass_backend_supported
from ._attention.backends import is_fa3_backend_supported as is_fa3_backend_supported
from ._attention.backends import (
    is_fa3_prefill_head_dim_supported as is_fa3_prefill_head_dim_supported,
)
from ._attention.backends import prepare_jit_additional_args as prepare_jit_additional_args
from ._attention.plan.alibi import get_alibi_slopes as get_alibi_slopes
from ._common.arch import device_support_pdl as device_support_pdl
from ._common.arch import get_compute_capability as get_compute_capability
from ._common.arch import get_device_index as get_device_index
from ._common.arch import get_device_name as get_device_name
from ._common.arch import get_device_properties as get_device_properties
from ._common.arch import get_device_sm_count as get_device_sm_count
from ._common.arch import get_gpu_memory_bandwidth as get_gpu_memory_bandwidth
from ._common.arch import get_shared_bytes_per_block_optin as get_shared_bytes_per_block_optin
from ._common.arch import is_sm12x_supported as is_sm12x_supported
from ._common.arch import is_sm90a_supported as is_sm90a_supported
from ._common.arch import is_sm100a_supported as is_sm100a_supported
from ._common.arch import is_sm100f_supported as is_sm100f_supported
from ._common.arch import is_sm110a_supported as is_sm110a_supported
from ._common.arch import is_sm120a_supported as is_sm120a_supported
from ._common.arch import is_sm120f_supported as is_sm120f_supported
from ._common.arch import is_sm121a_supported as is_sm121a_supported
from ._instrument.experimental import experimental_backend as experimental_backend
from .compat.backends import BackendSupportedError as BackendSupportedError
from .compat.backends import backend_requirement as backend_requirement
from .compat.backends import supported_compute_capability as supported_compute_capability
from .compilation_context import NoTargetError
from .jit.core import logger
from .jit.env import has_flashinfer_jit_cache as has_flashinfer_jit_cache
from .jit.errors import MissingJITCacheError, ToolchainError
from .jit.global_timer import get_global_timer

log2e = math.log2(math.e)
ln2 = math.log(2.0)


class GPUArchitectureError(Exception):
    """A GPU that a caller's code is not for."""


class LibraryError(Exception):
    """A library that a caller's code needs and does not find."""


class PosEncodingMode(enum.Enum):
    """Positional encoding that an attention kernel applies to queries and keys."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(enum.Enum):
    """Which keys a query sees."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(enum.Enum):
    """Order of tokens (N), heads (H) and channels (D)."""

    NHD = 0
    HND = 1


@dataclasses.dataclass
class FP4Tensor:
    """Numbers of four bits and their scales, as engines pass an output; no kernel here takes one.

    Attributes
    ----------
    data : torch.Tensor
        Two numbers a byte, uint8.
    scale : torch.Tensor
        Scales of groups of them, float8_e4m3fn or their bytes.
    scale_start_index : int
        The row of `scale` that belongs to the first of `data`.
    original_shape : tuple of int, optional
        Shape of the numbers.
    """

    data: torch.Tensor
    scale: torch.Tensor
    scale_start_index: int = 0
    original_shape: tuple[int, ...] | None = None


class LogLevel(enum.Enum):
    """Levels of messages, the most talkative first."""

    TRACE = 0
    DEBUG = 1
    INFO = 2
    WARN = 3
    ERROR = 4
    CRITICAL = 5


_CVT_RS = ((10, 0), (10, 3), (10, 7))


def set_log_level(lvl_str: str) -> None:
    """Level of the JIT's messages: ``"debug"``, ``"info"``, ``"warning"``, ``"error"``, ..."""
    logger.setLevel(lvl_str.upper())


def get_indptr(x: torch.Tensor) -> torch.Tensor:
    """Offsets of parts from their lengths ``[n]``: ``[n + 1]``, int64, the first one 0."""
    return torch.nn.functional.pad(x.to(torch.int64).cumsum(0), (1, 0))


def determine_gemm_backend(device: torch.device) -> str:
    """``"sm90"`` on Hopper, else ``"sm80"``: kernels of grouped products."""
    return "sm90" if is_sm90a_supported(device) else "sm80"


def get_native_fp4_dtype() -> torch.dtype:
    """PyTorch's dtype of two 4-bit numbers a byte, or uint8 where it has none."""
    return getattr(torch, "float4_e2m1fn_x2", torch.uint8)


def get_cuda_python_version() -> str:
    """Version of the package cuda-python.

    Raises
    ------
    importlib.metadata.PackageNotFoundError
        If it is not installed; nothing here needs it.
    """
    return importlib.metadata.version("cuda-python")


def get_default_generators(device: torch.device) -> torch.Generator:
    """The generator that random functions use on a CUDA device without another one."""
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a cuda device, got {str(device)!r}")
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def is_cvt_rs_supported(device: torch.device | None = None) -> bool:
    """Whether a GPU converts with stochastic rounding in one instruction: SM100, SM103 and SM107.

    Parameters
    ----------
    device : torch.device, optional
        The GPU; by default the current one. Without any the answer is no.
    """
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) in _CVT_RS


def cvt_rs_supported_arches_text() -> str:
    """The architectures of `is_cvt_rs_supported`, for messages."""
    return ", ".join(f"SM{major}{minor}" for major, minor in _CVT_RS)


def is_confidential_compute() -> bool:
    """Whether the machine's GPUs are in the confidential mode; no where NVML cannot tell."""
    with contextlib.suppress(Exception):
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        try:
            state = pynvml.c_nvmlConfComputeSystemState_t()
            pynvml.nvmlSystemGetConfComputeState(state)
            return bool(state.ccFeature)
        finally:
            pynvml.nvmlShutdown()
    return False


def get_globaltimer_kernel() -> Callable[[torch.Tensor], None] | None:
    """A function that writes the GPU's clock at its place in the current stream's work.

    Differences of two such times measure work where events of CUDA do not, as in the confidential
    mode. The clock's step is some tens of nanoseconds on Hopper.

    Returns
    -------
    callable or None
        It takes a tensor ``[1]``, int64 or uint64, on a GPU, and returns before the time is there,
        in nanoseconds. None where its kernel can be neither found nor compiled.
    """
    try:
        return get_global_timer()
    except (ToolchainError, MissingJITCacheError, NoTargetError):
        return None


def has_cuda_cudart() -> bool:
    """Whether cuda-python's interface of the CUDA runtime is installed; nothing here needs it."""

    def exists(name: str) -> bool:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.util.find_spec(name) is not None
        return False

    return exists("cuda.bindings.runtime") or exists("cuda.cudart")


def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The smallest multiple of ``y`` that is at least ``x``."""
    return ceil_div(x, y) * y


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is at least ``x``; 1 for ``x`` below 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """The largest power of two that is at most ``x``.

    Raises
    ------
    ValueError
        If ``x`` is below 1: there is none.
    """
    if x < 1:
        raise ValueError(f"x must be at least 1, got {x}")
    return 1 << (x.bit_length() - 1)


def canonicalize_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype that ``dtype`` is or names: ``"bfloat16"`` and ``torch.bfloat16`` mean the same.

    Raises
    ------
    ValueError, TypeError
        If the string names no dtype, or ``dtype`` is of another type.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        raise TypeError(f"dtype must be a torch.dtype or its name, got {dtype!r}")
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"dtype must be the name of a torch.dtype such as 'bfloat16', got {dtype!r}"
        )
    return found


def is_float8(x: torch.Tensor) -> bool:
    """Whether a tensor has one of the two FP8 element types of NVIDIA GPUs."""
    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def get_trtllm_gen_multi_ctas_kv_counter_bytes(
    batch_size: int, num_qo_heads: int, sm_count: int
) -> int:
    """Bytes of the counters that Blackwell's decode kernels share between CTAs of a request.

    Engines allocate them on every GPU; no kernel here reads them. There are as many 4-byte counters
    as pairs of request and head, but at least one for each multiprocessor, rounded up to 8.
    """
    return 4 * round_up(max(batch_size * num_qo_heads, sm_count), 8)


def check_shape_dtype_device(
    x: torch.Tensor,
    expected_shape: Sequence[int] | None,
    expected_dtype: torch.dtype | None,
    expected_device: torch.device | None,
    name: str,
) -> None:
    """Raise unless a tensor is as expected; what is None is not looked at.

    Parameters
    ----------
    x : torch.Tensor
        The tensor to look at.
    expected_shape : sequence of int, optional
        All sizes.
    expected_dtype : torch.dtype, optional
        Element type.
    expected_device : torch.device, optional
        Device; without an index any device of that type is accepted.
    name : str
        The tensor's name in the message.

    Raises
    ------
    ValueError
        On the first difference.
    """
    if expected_shape is not None and tuple(x.shape) != tuple(expected_shape):
        raise ValueError(f"{name} must have shape {tuple(expected_shape)}, got {tuple(x.shape)}")
    if expected_dtype is not None and x.dtype != expected_dtype:
        raise ValueError(f"{name} must have dtype {expected_dtype}, got {x.dtype}")
    if expected_device is not None:
        wanted = torch.device(expected_device)
        found = x.device if wanted.index is not None else torch.device(x.device.type)
        if found != wanted:
            raise ValueError(f"{name} must be on {wanted}, got {x.device}")


@functools.cache
def version_at_least(version: str | None, base_version: str | None) -> bool:
    """Whether ``version`` is ``base_version`` or later, in the order of PEP 440.

    False where either is None, as ``torch.version.cuda`` is in a build without CUDA.
    """
    from packaging.version import Version

    if version is None or base_version is None:
        return False
    return Version(version) >= Version(base_version)


def register_custom_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: str | Sequence[str] | None = None,
    schema: str | None = None,
) -> Callable[..., Any]:
    """``torch.library.custom_op``: make a function one opaque node for ``torch.compile``."""
    return torch.library.custom_op(
        name, fn, mutates_args=mutates_args, device_types=device_types, schema=schema
    )


def register_fake_op(name: str, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``torch.library.register_fake``: shapes and dtypes of a custom op without running it."""
    return torch.library.register_fake(name, fn)
