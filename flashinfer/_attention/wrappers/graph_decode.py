"""Decoding under CUDA graphs: a wrapper with that name, and a plan that engines bind to it."""

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


class IndptrCheck:
    """Whether offsets on the GPU are those that a plan was made of, without waiting for them."""

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None

    def compare(self, given: torch.Tensor, planned: torch.Tensor) -> None:
        """Begin to compare two tensors, and finish what the last call began.

        Raises
        ------
        ValueError
            If they differ and are both on the host, or those of the last call differed.
        """
        if self._pending is not None:
            fetched, expected, ready = self._pending
            if not ready.query():
                return
            self._pending = None
            _refuse_other_offsets(fetched, expected)
        if not isinstance(given, torch.Tensor) or not isinstance(planned, torch.Tensor):
            return  # for the plan to say
        count = min(given.numel(), planned.numel())
        given, planned = given.reshape(-1)[:count], planned.reshape(-1)[:count]
        if given.device.type == "cpu":
            _refuse_other_offsets(given, planned)
        elif given.is_cuda and not torch.cuda.is_current_stream_capturing():
            fetched = torch.empty(count, dtype=given.dtype, pin_memory=True)
            fetched.copy_(given, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            self._pending = fetched, planned.clone(), ready


def _refuse_other_offsets(given: torch.Tensor, planned: torch.Tensor) -> None:
    if not torch.equal(given.long(), planned.long()):
        at = int((given.long() != planned.long()).nonzero()[0])
        raise ValueError(
            "`global_override_indptr_cpu` must have the values of `indptr`, whose lengths the "
            f"kernels use: element {at} is {int(planned[at])}, and {int(given[at])} in `indptr`"
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
        nothing else is fetched. It must have the values of `indptr`: the kernels take the lengths
        from the plan. An upper bound is refused: at once if both are on the host, else by the next
        plan, as the values on the GPU are fetched without waiting for them.
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
    if global_override_indptr_cpu is not None:
        if self._indptr_check is None:
            self._indptr_check = IndptrCheck()
        self._indptr_check.compare(indptr, global_override_indptr_cpu)
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
