"""Communication between the GPUs of one host, over peer memory.

All-reduce, also fused with the residual and the norm that follow it, all-gather, reduce-scatter.
Protocols, with a picture of each: docs/comm.md. Beyond one host, use ``torch.distributed``.
"""

from .allreduce import TRTLLMAllReduceFusionWorkspace as TRTLLMAllReduceFusionWorkspace
from .allreduce import allreduce_fusion as allreduce_fusion
from .allreduce import create_allreduce_fusion_workspace as create_allreduce_fusion_workspace
from .collectives import ExchangeWorkspace as ExchangeWorkspace
from .collectives import all_gather as all_gather
from .collectives import reduce_scatter as reduce_scatter
from .cuda_ipc import CudaRTLibrary as CudaRTLibrary
from .cuda_ipc import create_shared_buffer as create_shared_buffer
from .cuda_ipc import free_shared_buffer as free_shared_buffer
from .fusion_names import AllReduceFusionOp as AllReduceFusionOp
from .fusion_names import AllReduceFusionPattern as AllReduceFusionPattern
from .fusion_names import AllReduceStrategyConfig as AllReduceStrategyConfig
from .fusion_names import AllReduceStrategyType as AllReduceStrategyType
from .fusion_names import QuantizationSFLayout as QuantizationSFLayout
from .mapping import Mapping as Mapping
from .mnnvl import MnnvlConfig as MnnvlConfig
from .peer_workspace import CommError as CommError
from .trtllm_ar import compute_fp4_swizzled_layout_sf_size as compute_fp4_swizzled_layout_sf_size
from .trtllm_ar import trtllm_allreduce_fusion as trtllm_allreduce_fusion
from .trtllm_ar import (
    trtllm_create_ipc_workspace_for_all_reduce as trtllm_create_ipc_workspace_for_all_reduce,
)
from .trtllm_ar import (
    trtllm_create_ipc_workspace_for_all_reduce_fusion as trtllm_create_ipc_workspace_for_all_reduce_fusion,  # noqa: E501
)
from .trtllm_ar import trtllm_custom_all_reduce as trtllm_custom_all_reduce
from .trtllm_ar import (
    trtllm_destroy_ipc_workspace_for_all_reduce as trtllm_destroy_ipc_workspace_for_all_reduce,
)
from .trtllm_ar import (
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion as trtllm_destroy_ipc_workspace_for_all_reduce_fusion,  # noqa: E501
)
from .trtllm_ar import trtllm_lamport_initialize as trtllm_lamport_initialize
from .trtllm_ar import trtllm_lamport_initialize_all as trtllm_lamport_initialize_all
from .workspace_base import AllReduceFusionWorkspace as AllReduceFusionWorkspace
