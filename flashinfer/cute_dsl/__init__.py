"""Kernels that are written in CuTe-DSL, and what one needs to write another.

Functions and probes are here without the compiler, which is the extra ``cute-dsl``. Kernel classes
and device helpers (`norm_kernel`, `fp4_common`) import it.
"""

from typing import Any

from .availability import is_cute_dsl_arch_supported as is_cute_dsl_arch_supported
from .availability import is_cute_dsl_available as is_cute_dsl_available
from .availability import is_cute_dsl_experimental_available as is_cute_dsl_experimental_available
from .availability import is_rubin_cute_dsl_available as is_rubin_cute_dsl_available
from .availability import require_cute_dsl_arch as require_cute_dsl_arch
from .moe import moe_activation as moe_activation
from .moe import moe_finalize as moe_finalize
from .moe import moe_grouped_gemm_cutedsl as moe_grouped_gemm_cutedsl
from .norm import fused_add_rmsnorm_cute as fused_add_rmsnorm_cute
from .norm import fused_add_rmsnorm_quant_cute as fused_add_rmsnorm_quant_cute
from .norm import layernorm_cute as layernorm_cute
from .norm import qk_rmsnorm_cute as qk_rmsnorm_cute
from .norm import rmsnorm_cute as rmsnorm_cute
from .norm import rmsnorm_quant_cute as rmsnorm_quant_cute

__all__ = [
    "fused_add_rmsnorm_cute",
    "fused_add_rmsnorm_quant_cute",
    "is_cute_dsl_arch_supported",
    "is_cute_dsl_available",
    "is_cute_dsl_experimental_available",
    "is_rubin_cute_dsl_available",
    "layernorm_cute",
    "moe_activation",
    "moe_finalize",
    "moe_grouped_gemm_cutedsl",
    "qk_rmsnorm_cute",
    "require_cute_dsl_arch",
    "rmsnorm_cute",
    "rmsnorm_quant_cute",
]

_KERNELS = (
    "FusedAddRMSNormKernel",
    "FusedAddRMSNormQuantKernel",
    "LayerNormKernel",
    "QKRMSNormKernel",
    "RMSNormKernel",
    "RMSNormQuantKernel",
)


def __getattr__(name: str) -> Any:
    if name in _KERNELS:
        from . import norm_kernel

        return getattr(norm_kernel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
