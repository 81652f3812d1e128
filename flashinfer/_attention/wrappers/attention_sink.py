"""Attention with sinks: ``flashinfer.attention.BatchAttentionWithAttentionSinkWrapper``."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..._common.checks import count as check_count
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.attention_wrappers import sink_arguments, sink_run_trace
from ..checks import check_window, refuse, resolve_dtype, resolve_dtypes, scalar
from ..plan.spec import AttentionSpec
from .base import Cache, SpecArguments, returning_lse
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .run_options import PrefillRunOptions


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    r"""Attention over a paged cache with a sink: one more logit per head, which has no value.

    .. math:: o_i = \frac{\sum_j e^{s_{ij}} v_j}{\sum_j e^{s_{ij}} + e^{sink}}

    The sinks follow the cache in `run`: ``run(q, paged_kv_cache, sink, sm_scale)``; the last may be
    left out.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, \
paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend
        As for :class:`BatchPrefillWithPagedKVCacheWrapper`.
    pos_encoding_mode : str
        ``"NONE"``, ``"ROPE_LLAMA"`` or ``"ALIBI"``: what `plan` takes by default.
    use_fp16_qk_reduction : bool
        False: logits are summed in float32.
    q_data_type, kv_data_type : torch.dtype
        The value that every `plan` must be given.
    head_dim_qk, head_dim_vo : int
        The value that every `plan` must be given.
    window_left : int
        The default of `plan`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024; the form of
    gpt-oss.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace, window_left=127)
    >>> indptr = torch.tensor([0, 20], dtype=torch.int32)
    >>> pages = torch.tensor([4, 1], dtype=torch.int32, device="cuda")
    >>> kv_indptr, last = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([9]).int()
    >>> heads = dict(num_qo_heads=64, num_kv_heads=8, head_dim_qk=128, page_size=16)
    >>> wrapper.plan(indptr, kv_indptr, pages, last, causal=True, q_data_type="bfloat16", **heads)
    >>> cache = torch.randn(5, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> q = torch.randn(20, 64, 128, dtype=torch.bfloat16, device="cuda")
    >>> out = wrapper.run(q, cache, torch.randn(64, device="cuda"))
    """

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        refuse("logits are summed in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        # The output's is for `plan` to say, which needs one with 8-bit queries.
        q_dtype, kv_dtype, _ = resolve_dtypes(q_data_type, kv_data_type, torch.bfloat16)
        self._made_for: dict[str, Any] = {
            "q_data_type": q_dtype,
            "kv_data_type": kv_dtype,
            "head_dim_qk": check_count("head_dim_qk", head_dim_qk),
            "head_dim_vo": check_count("head_dim_vo", head_dim_vo),
        }
        self._default_window = check_window(window_left)
        self._default_encoding = pos_encoding_mode

    def _checked_spec(self, a: SpecArguments) -> AttentionSpec:
        """As for every wrapper, with what this one was made for."""
        q_data_type, kv_data_type = a.q_data_type, a.kv_data_type
        # "float16" is what a plan says that says nothing.
        if isinstance(q_data_type, str) and q_data_type == "float16":
            q_data_type = self._made_for["q_data_type"]
        if kv_data_type is None:
            kv_data_type = self._made_for["kv_data_type"]
        self._check_made_for("q_data_type", resolve_dtype("q_data_type", q_data_type))
        mode, window_left = a.pos_encoding_mode, a.window_left
        spec = super()._checked_spec(
            a._replace(
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                pos_encoding_mode=self._default_encoding if mode == "NONE" else mode,
                window_left=self._default_window if window_left == -1 else window_left,
            )
        )
        for name in self._made_for:
            self._check_made_for(name, getattr(spec, name))
        return dataclasses.replace(spec, sinks=True)

    def _check_made_for(self, name: str, planned: Any) -> None:
        if planned != self._made_for[name]:
            made = self._made_for[name]
            raise ValueError(f"`{name}` must be {made} as the wrapper was made, got {planned}")

    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: Literal[False] = False,
        **options: "Unpack[PrefillRunOptions]",
    ) -> torch.Tensor: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: Literal[True],
        **options: "Unpack[PrefillRunOptions]",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: bool,
        **options: "Unpack[PrefillRunOptions]",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=sink_run_trace)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch for one layer.

        Parameters
        ----------
        q, paged_kv_cache
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        *args
            The sinks, ``[num_qo_heads]`` float32, which are logits as they are; then, if it is not
            what was planned, the factor of the other logits.
        sinks : torch.Tensor, optional
            The sinks, if they are not the first of `args`.
        q_scale, k_scale, v_scale, out, lse, return_lse, lse_base, lse_layout, enable_pdl, \
window_left, kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output and, with `return_lse`, log-sum-exps, the sink included.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, or there are no sinks.
        """
        sinks, factor = sink_arguments(self._problem and self._problem.spec, args, sinks)
        if q_scale is None:
            q_scale = factor
        elif factor != 1.0:
            is_tensor = isinstance(q_scale, torch.Tensor)
            q_scale = factor * (q_scale if is_tensor else scalar("q_scale", q_scale))
        return super().run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
            enable_pdl=enable_pdl,
            window_left=window_left,
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )

    # The base's would go round the sinks.
    run_return_lse = returning_lse(run)
