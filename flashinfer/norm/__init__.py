"""RMS norm and layer norm, fused with the residual sum before and the quantisation after.

Inputs are ``[batch, hidden]`` or ``[batch, heads, head_dim]`` (then normalised per head) in
float16, bfloat16 or float32. The last dimension must be contiguous, other strides are free.
Everything is computed in float32 and rounded once.
"""

from ..jit.norm import gen_norm_module as gen_norm_module
from .fused import fused_add_rmsnorm_fp8_block_quant as fused_add_rmsnorm_fp8_block_quant
from .fused import fused_rmsnorm_silu as fused_rmsnorm_silu
from .fused import rmsnorm_fp8_block_quant as rmsnorm_fp8_block_quant
from .gated import gated_residual_next_rmsnorm as gated_residual_next_rmsnorm
from .gated import gated_residual_rmsnorm as gated_residual_rmsnorm
from .gated import rmsnorm_sigmoid_gate as rmsnorm_sigmoid_gate
from .gated import supports_gated_residual_next_rmsnorm as supports_gated_residual_next_rmsnorm
from .gated import supports_gated_residual_rmsnorm as supports_gated_residual_rmsnorm
from .gated import supports_rmsnorm_sigmoid_gate as supports_rmsnorm_sigmoid_gate
from .modulated import (
    fused_dit_gate_residual_layernorm_gamma_beta as fused_dit_gate_residual_layernorm_gamma_beta,
)
from .modulated import (
    fused_dit_gate_residual_layernorm_scale_shift as fused_dit_gate_residual_layernorm_scale_shift,
)
from .modulated import (
    fused_dit_residual_layernorm_scale_shift as fused_dit_residual_layernorm_scale_shift,
)
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
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "gen_norm_module",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_fp8_block_quant",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
    "supports_gated_residual_next_rmsnorm",
    "supports_gated_residual_rmsnorm",
    "supports_rmsnorm_sigmoid_gate",
]
