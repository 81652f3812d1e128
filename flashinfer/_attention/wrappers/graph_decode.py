"""Decoding under CUDA graphs: a wrapper with that name, and a plan that engines bind to it."""

import torch

from ..._instrument.decorator import flashinfer_api
from ...jit.attention.config import decode_tile_q
from ..checks import with_data_type
from ..index_tensors import check_index_vector, copy_to_buffer, device_indices
from ..plan.choice import KernelChoice
from ..plan.on_device import plan_on_device
from ..plan.requests import ArgumentNames, AttentionProblem, DeviceLengths, Requests
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .graphs import check_unchanged
from .plan_arguments import DecodeArguments, decode_options


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


def _plan_on_device(wrapper: BatchDecodeWithPagedKVCacheWrapper, a: DecodeArguments) -> None:
    """``plan`` with `indptr` on the GPU, where a kernel reads it."""
    wrapper._problem = None  # whatever becomes of this plan
    options = wrapper._remembered(decode_options(a), lambda: wrapper._checked_options(a))
    for name, tensor in (("indptr", a.indptr), ("last_page_len", a.last_page_len)):
        check_index_vector(name, tensor)
    place = (wrapper.device, torch.int32, True)
    indptr, last_page_len = a.indptr.to(*place), a.last_page_len.to(*place)
    pages = device_indices("indices", a.indices, wrapper.device)
    if wrapper._paged_kv_indices_buf is not None:
        copies = (pages, indptr, last_page_len)
        names = ("indices", "indptr", "last_page_len")
        for name, values in zip(names, copies, strict=True):
            copy_to_buffer(name, values, getattr(wrapper, f"_paged_kv_{name}_buf"))
    spec, tokens = options.spec, options.tokens_per_request
    rows = tokens * spec.group_size
    tile_q = decode_tile_q(rows, spec.tile_head_dim, spec.kv_data_type)
    choice = KernelChoice("fa2", tile_q)
    tensors = options.tensors._replace(kv_indices=wrapper._paged_kv_indices_buf)
    if tensors.kv_indices is None:
        tensors = tensors._replace(kv_indices=pages)
    # The host knows that all requests together have these pages.
    bound = torch.full((indptr.numel(),), pages.numel(), dtype=torch.int32)
    bound[:1] = 0
    full_pages = torch.full((max(indptr.numel() - 1, 0),), options.page_size, dtype=torch.int32)
    requests = Requests(
        ArgumentNames.DECODE,
        None,
        bound,
        None,
        full_pages,
        options.page_size,
        tokens,
        spec.causal,
        spec.window_left,
    )
    problem = AttentionProblem(spec, requests, tensors)
    wrapper._plan_options = options.plan
    if wrapper._captured is not None:
        check_unchanged(wrapper._captured, wrapper._fixed_by_capture(problem))
    lengths = DeviceLengths(None, indptr, None, last_page_len, tokens)
    plan_on_device(wrapper._executor, problem, lengths, options.plan, choice)
    wrapper._problem = wrapper._plan_problem = problem
    wrapper._overrides = None


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
        Offsets on the host, those of `indptr` or upper bounds of them. Given beside an `indptr` on
        the GPU, a kernel plans there with the lengths that `indptr` and `last_page_len` have when
        it runs, and the host waits for nothing; what `fixed_split_size` and `disable_split_kv` fix
        is planned on the host with `indptr` fetched. Its values are not read.
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
        As for ``plan``, and so is what follows them. Results keep the dtype that the latest
        ``plan`` gave them.

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
        check_index_vector("global_override_indptr_cpu", global_override_indptr_cpu)
    planned = self._plan_problem  # a graph has its dtypes
    arguments = DecodeArguments(
        indptr,
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
        o_data_type=None if planned is None else planned.spec.o_data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
    is_cut_anywhere = fixed_split_size in (None, -1) and not disable_split_kv
    is_there = isinstance(indptr, torch.Tensor) and indptr.is_cuda
    is_portable = self._backend != "fa3"  # the kernel plans no other
    if global_override_indptr_cpu is not None and is_there and is_cut_anywhere and is_portable:
        _plan_on_device(self, arguments)
    else:
        self._plan_decode(arguments)
