"""Communication between the GPUs of one host, over peer memory.

All-reduce, also fused with the residual and the norm that follow it, all-gather, reduce-scatter,
the all-to-all of experts, context parallelism.
Protocols, with a picture of each: docs/comm.md. Beyond one host, use ``torch.distributed``.
"""

from ..jit.comm import gen_trtllm_comm_module as gen_trtllm_comm_module
from .all_gather_matmul import all_gather_matmul as all_gather_matmul
from .allreduce import TRTLLMAllReduceFusionWorkspace as TRTLLMAllReduceFusionWorkspace
from .allreduce import allreduce_fusion as allreduce_fusion
from .allreduce import create_allreduce_fusion_workspace as create_allreduce_fusion_workspace
from .collectives import ExchangeWorkspace as ExchangeWorkspace
from .collectives import all_gather as all_gather
from .collectives import reduce_scatter as reduce_scatter
from .cuda_ipc import CudaRTLibrary as CudaRTLibrary
from .cuda_ipc import create_shared_buffer as create_shared_buffer
from .cuda_ipc import free_shared_buffer as free_shared_buffer
from .dcp_alltoall import (
    decode_cp_a2a_allocate_mnnvl_workspace as decode_cp_a2a_allocate_mnnvl_workspace,
)
from .dcp_alltoall import decode_cp_a2a_alltoall as decode_cp_a2a_alltoall
from .dcp_alltoall import decode_cp_a2a_init_workspace as decode_cp_a2a_init_workspace
from .dcp_alltoall import decode_cp_a2a_workspace_size as decode_cp_a2a_workspace_size
from .dcp_lse_reduce import decode_cp_a2a_lse_reduce as decode_cp_a2a_lse_reduce
from .dcp_lse_reduce import (
    decode_cp_a2a_lse_reduce_create_workspace as decode_cp_a2a_lse_reduce_create_workspace,
)
from .dcp_lse_reduce import (
    decode_cp_a2a_lse_reduce_workspace_size as decode_cp_a2a_lse_reduce_workspace_size,
)
from .dlpack_utils import pack_strided_memory as pack_strided_memory
from .fusion_names import AllReduceFusionOp as AllReduceFusionOp
from .fusion_names import AllReduceFusionPattern as AllReduceFusionPattern
from .fusion_names import AllReduceStrategyConfig as AllReduceStrategyConfig
from .fusion_names import AllReduceStrategyType as AllReduceStrategyType
from .fusion_names import QuantizationSFLayout as QuantizationSFLayout
from .mapping import Mapping as Mapping
from .mnnvl import MnnvlConfig as MnnvlConfig
from .peer_workspace import CommError as CommError
from .quantized_allreduce import quantized_all_reduce as quantized_all_reduce
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
from .trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace as MNNVLAllReduceFusionWorkspace
from .trtllm_mnnvl_ar import is_mnnvl_cutedsl_supported as is_mnnvl_cutedsl_supported
from .trtllm_moe_alltoall import MoeAlltoAll as MoeAlltoAll
from .trtllm_moe_alltoall import moe_a2a_active_rank_mask as moe_a2a_active_rank_mask
from .trtllm_moe_alltoall import moe_a2a_combine as moe_a2a_combine
from .trtllm_moe_alltoall import moe_a2a_dispatch as moe_a2a_dispatch
from .trtllm_moe_alltoall import (
    moe_a2a_get_workspace_size_per_rank as moe_a2a_get_workspace_size_per_rank,
)
from .trtllm_moe_alltoall import moe_a2a_initialize as moe_a2a_initialize
from .trtllm_moe_alltoall import moe_a2a_sanitize_expert_ids as moe_a2a_sanitize_expert_ids
from .trtllm_moe_alltoall import (
    moe_a2a_wrap_payload_tensor_in_workspace as moe_a2a_wrap_payload_tensor_in_workspace,
)
from .trtllm_moe_ar import trtllm_moe_allreduce_fusion as trtllm_moe_allreduce_fusion
from .trtllm_moe_ar import (
    trtllm_moe_finalize_allreduce_fusion as trtllm_moe_finalize_allreduce_fusion,
)
from .ulysses import UlyssesCommunicator as UlyssesCommunicator
from .ulysses import UlyssesWorkspace as UlyssesWorkspace
from .ulysses import dispose_ulysses_a2a as dispose_ulysses_a2a
from .ulysses import gen_ulysses_a2a_module as gen_ulysses_a2a_module
from .ulysses import get_ulysses_a2a_module as get_ulysses_a2a_module
from .ulysses import init_ulysses_a2a as init_ulysses_a2a
from .ulysses import ulysses_a2a as ulysses_a2a
from .ulysses_head_chunk import merge_ulysses_output_head_chunk as merge_ulysses_output_head_chunk
from .ulysses_head_chunk import pack_ulysses_qkv_head_chunk as pack_ulysses_qkv_head_chunk
from .ulysses_topology import ULYSSES_BACKENDS as ULYSSES_BACKENDS
from .ulysses_topology import UlyssesBackendDecision as UlyssesBackendDecision
from .ulysses_topology import UlyssesBackendError as UlyssesBackendError
from .ulysses_topology import UlyssesRankTopology as UlyssesRankTopology
from .ulysses_topology import decide_ulysses_backend as decide_ulysses_backend
from .ulysses_topology import probe_ulysses_rank_topology as probe_ulysses_rank_topology
from .ulysses_topology import resolve_ulysses_backend as resolve_ulysses_backend
from .vllm_ar import gen_vllm_comm_module as gen_vllm_comm_module
from .vllm_ar import vllm_all_reduce as vllm_all_reduce
from .vllm_ar import vllm_dispose as vllm_dispose
from .vllm_ar import vllm_get_graph_buffer_ipc_meta as vllm_get_graph_buffer_ipc_meta
from .vllm_ar import vllm_init_custom_ar as vllm_init_custom_ar
from .vllm_ar import vllm_meta_size as vllm_meta_size
from .vllm_ar import vllm_register_buffer as vllm_register_buffer
from .vllm_ar import vllm_register_graph_buffers as vllm_register_graph_buffers
from .workspace_base import AllReduceFusionWorkspace as AllReduceFusionWorkspace
