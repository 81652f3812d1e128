"""GPU kernels for LLM serving, compiled when they are first called."""

from .activation import gelu_and_mul as gelu_and_mul
from .activation import gelu_tanh_and_mul as gelu_tanh_and_mul
from .activation import silu_and_mul as silu_and_mul
from .fi_trace import fi_trace as fi_trace
from .norm import fused_add_rmsnorm as fused_add_rmsnorm
from .norm import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
from .norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
from .norm import gemma_rmsnorm as gemma_rmsnorm
from .norm import layernorm as layernorm
from .norm import layernorm_quant as layernorm_quant
from .norm import rmsnorm as rmsnorm
from .norm import rmsnorm_quant as rmsnorm_quant
from .version import __git_version__ as __git_version__
from .version import __version__ as __version__

# Last: FLASHINFER_BACKEND=reference routes what was imported above.
from .reference_backend import reference_backend as reference_backend  # isort: skip
