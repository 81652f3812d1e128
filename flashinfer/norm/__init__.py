"""RMS norm and layer norm, fused with the residual sum before and the quantisation after.

Inputs are ``[batch, hidden]`` or ``[batch, heads, head_dim]`` (then normalised per head) in
float16, bfloat16 or float32. The last dimension must be contiguous, other strides are free.
Everything is computed in float32 and rounded once.
"""

from ..jit.norm import gen_norm_module as gen_norm_module
from .fused import fused_add_rmsnorm_fp8_block_quant as fused_add_rmsnorm_fp8_block_quant
from .fused import fused_rmsnorm_silu as fused_rmsnorm_silu
from .fused import rmsnorm_fp8_block_quant as rmsnorm_fp8_block_quant
from .qk_norm_rope import fused_qk_rmsnorm_rope as fused_qk_rmsnorm_rope
from .rms import fused_add_rmsnorm as fused_add_rmsnorm
from .rms import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
from .rms import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
from .rms import gemma_rmsnorm as gemma_rmsnorm
from .rms import layernorm as layernorm
from .rms import layernorm_quant as layernorm_quant
from .rms import rmsnorm as rmsnorm
from .rms import rmsnorm_quant as rmsnorm_quant

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "gen_norm_module",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_fp8_block_quant",
    "rmsnorm_quant",
]
