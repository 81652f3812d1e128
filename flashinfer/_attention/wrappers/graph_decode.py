"""Decoding under CUDA graphs: a wrapper with that name, and a plan that engines bind to it."""

from __future__ import annotations

import torch

from ..._instrument.decorator import flashinfer_api
from ..checks import with_data_type
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .plan_arguments import DecodeArguments


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """``BatchDecodeWithPagedKVCacheWrapper`` with ``use_cuda_graph=True``.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        Its `float_workspace_buffer`.
    indptr_buffer, indices_buffer, last_page_len_buffer : torch.Tensor
        Its buffers.
    kv_layout, use_tensor_cores
        As there.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


@flashinfer_api
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
    data_type: torch.dtype | str | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """``BatchDecodeWithPagedKVCacheWrapper.plan`` for callers that have `indptr` on both sides.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
        The wrapper: callers bind this function in place of its ``begin_forward``.
    global_override_indptr_cpu : torch.Tensor, optional
        `indptr` on the host, which spares fetching it from the GPU. With pages of one token
        nothing else is fetched.
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
        As for ``plan``, and so is what follows them.

    Raises
    ------
    TypeError, ValueError
        As ``plan`` does.
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise TypeError(
            "`self` must be a BatchDecodeWithPagedKVCacheWrapper, got " + type(self).__name__
        )
    q_data_type, kv_data_type = with_data_type(q_data_type, kv_data_type, data_type)
    arguments = DecodeArguments(
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type or "float16",
        kv_data_type=kv_data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
    self._plan_decode(arguments)
