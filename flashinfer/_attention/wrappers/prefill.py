"""What the paged and the ragged prefill wrapper share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_count, check_flag, host_indices, refuse
from ..plan.choice import check_lse_base, check_lse_layout
from ..plan.masks import add_items, add_mask
from ..plan.page_tables import check_buffer, keep
from ..plan.problem import AttentionProblem
from .base import AttentionWrapper, planned

LN_2 = math.log(2.0)


@dataclass(slots=True)
class PrefillArguments:
    """Arguments of ``plan`` that do not say where keys are; documented there."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None
    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    causal: bool
    pos_encoding_mode: str
    use_fp16_qk_reduction: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    dtypes: tuple[Any, Any, Any]
    prefix_len_ptr: torch.Tensor | None
    token_pos_in_items_ptr: torch.Tensor | None
    token_pos_in_items_len: int
    max_item_len_ptr: torch.Tensor | None
    seq_lens_q: torch.Tensor | None = None
    max_token_per_sequence: int | None = None
    max_sequence_kv: int | None = None
    uniform_q_len: int | None = None


class PrefillWrapper(AttentionWrapper):
    """Base of the prefill wrappers."""

    _causal = planned("causal")

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
        qo_indptr_buf: torch.Tensor | None,
        backend: str,
        jit_args: list[Any] | None,
        jit_kwargs: dict[str, Any] | None,
        variant_owns_mask: bool,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs
        )
        if check_flag("variant_owns_mask", variant_owns_mask) and jit_args is None:
            raise ValueError("`variant_owns_mask` must be False without `jit_args`, got True")
        if self._jit_kwargs.get("use_fp16_qk_reduction") or self._jit_kwargs.get("fp8_enabled"):
            raise ValueError(
                "`jit_kwargs`: use_fp16_qk_reduction and fp8_enabled must be False: queries are "
                "of 16 bits and logits are summed in float32"
            )
        self._variant_owns_mask = variant_owns_mask
        self._qo_indptr_buf = self._custom_mask_buf = self._mask_indptr_buf = None
        self._max_qo_tokens = 0
        self._pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # for buffers of a graph
        if not use_cuda_graph:
            return
        self._qo_indptr_buf = check_buffer("qo_indptr_buf", qo_indptr_buf, torch.int32, self.device)
        if (custom_mask_buf is None) != (mask_indptr_buf is None):
            raise ValueError("`custom_mask_buf` and `mask_indptr_buf` must be given together")
        if custom_mask_buf is not None:
            self._custom_mask_buf = check_buffer(
                "custom_mask_buf", custom_mask_buf, torch.uint8, self.device
            )
            self._mask_indptr_buf = check_buffer(
                "mask_indptr_buf",
                mask_indptr_buf,
                torch.int32,
                self.device,
                self._qo_indptr_buf.numel(),
            )

    # --- Planning -----------------------------------------------------------------------------

    def _prefill_problem(self, a: PrefillArguments, **where: Any) -> AttentionProblem:
        """The problem of a plan; `where`: index tensors, page size and names of AttentionProblem.

        Masks come last, since they may launch kernels: `_add_masks`.
        """
        causal = check_flag("causal", a.causal)
        _check_fp16_reduction(a.use_fp16_qk_reduction)
        options = self._options(
            a.num_qo_heads,
            a.num_kv_heads,
            a.head_dim_qk,
            a.head_dim_qk if a.head_dim_vo is None else a.head_dim_vo,
            a.pos_encoding_mode,
            a.window_left,
            a.logits_soft_cap,
            a.sm_scale,
            a.rope_scale,
            a.rope_theta,
            a.dtypes,
        )
        problem = AttentionProblem(causal=causal, **where, **options)
        if self._variant_owns_mask:
            problem.causal = False
            refuse(
                "with `variant_owns_mask` the variant's LogitsMask alone decides",
                causal=causal,
                custom_mask=a.custom_mask,
                packed_custom_mask=a.packed_custom_mask,
                prefix_len_ptr=a.prefix_len_ptr,
                window_left=a.window_left if a.window_left >= 0 else None,
            )
        if (
            a.seq_lens_q is not None
            or a.max_token_per_sequence is not None
            or a.max_sequence_kv is not None
            or a.uniform_q_len is not None
        ):
            _check_hints(problem, a)
        return problem

    def _add_masks(self, problem: AttentionProblem, a: PrefillArguments) -> None:
        self._pending = []
        has_mask = a.custom_mask is not None or a.packed_custom_mask is not None
        has_items = not (
            a.prefix_len_ptr is None
            and a.token_pos_in_items_ptr is None
            and a.max_item_len_ptr is None
        )
        if a.token_pos_in_items_len and not has_items:
            raise ValueError(
                "`token_pos_in_items_len` must be 0 without `prefix_len_ptr` and its like, got "
                f"{a.token_pos_in_items_len}"
            )
        if has_mask and has_items:
            raise ValueError("`custom_mask` and `prefix_len_ptr` exclude each other")
        if has_mask:
            if self._use_cuda_graph and self._custom_mask_buf is None:
                raise ValueError(
                    "`custom_mask` needs `custom_mask_buf` and `mask_indptr_buf` with CUDA graphs"
                )
            masks = (a.custom_mask, a.packed_custom_mask)
            buffers = (self._custom_mask_buf, self._mask_indptr_buf)
            self._pending = add_mask(problem, *masks, self.device, *buffers)
        elif self._custom_mask_buf is not None:
            raise ValueError("`custom_mask` must be given: the wrapper has `custom_mask_buf`")
        if has_items:
            add_items(
                problem,
                a.prefix_len_ptr,
                a.token_pos_in_items_ptr,
                a.token_pos_in_items_len,
                a.max_item_len_ptr,
                self.device,
            )

    def _graph_capacity(self, problem: AttentionProblem) -> tuple[int, int] | None:
        """Requests, and the query tokens of the first plan."""
        if self._qo_indptr_buf is None:
            return None
        return self._qo_indptr_buf.numel() - 1, self._max_qo_tokens or problem.num_qo_tokens

    def _keep(self, non_blocking: bool, *copies: tuple[str, Any, torch.Tensor | None]) -> None:
        """Fill the buffers of a CUDA graph, when its plan has succeeded."""
        for name, values, buffer in (*copies, *self._pending):
            if buffer is not None:
                keep(name, values, buffer, non_blocking)

    def _override_prefill(
        self,
        causal: bool,
        pos_encoding_mode: str,
        use_fp16_qk_reduction: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """Options of the deprecated ``forward``."""
        _check_fp16_reduction(use_fp16_qk_reduction)
        self._override(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )

    # --- Running ------------------------------------------------------------------------------

    def _launch_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        args: tuple[Any, ...],
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        lse_layout: str,
        window_left: int | None,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> Any:
        if lse_base != "log2" or lse_layout != "NH":
            check_lse_base(lse_base)
            check_lse_layout(lse_layout)
            if lse is not None or return_lse:
                return self._launch_converted(
                    *(q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse),
                    *(lse_base, lse_layout, window_left, sinks, enable_pdl),
                )
        return self._launch(
            *(q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse),
            *(window_left, sinks, enable_pdl),
        )

    def _launch_converted(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        args: tuple[Any, ...],
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        lse_layout: str,
        window_left: int | None,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> Any:
        """The kernel writes [tokens, heads] to the base 2; this is for those who want another."""
        if lse is not None:
            tokens, heads = q.shape[:2]
            shape = (heads, tokens) if lse_layout == "HN" else (tokens, heads)
            if lse.dtype != torch.float32 or lse.shape != shape:
                raise ValueError(
                    f"`lse` must be float32 of shape {list(shape)}, got "
                    f"{str(lse.dtype).removeprefix('torch.')} of shape {list(lse.shape)}"
                )
        out, base2 = self._launch(
            *(q, k, v, args, q_scale, k_scale, v_scale, out, None, True),
            *(window_left, sinks, enable_pdl),
        )
        result = base2.t() if lse_layout == "HN" else base2
        if lse_base == "ln":
            result = result * LN_2
        result = result.contiguous() if lse is None else lse.copy_(result)
        return (out, result) if return_lse else out


def _check_fp16_reduction(use_fp16_qk_reduction: bool) -> None:
    if check_flag("use_fp16_qk_reduction", use_fp16_qk_reduction):
        raise ValueError(
            "`use_fp16_qk_reduction` must be False, got True: logits are summed in float32"
        )


def _check_hints(problem: AttentionProblem, a: PrefillArguments) -> None:
    """What callers say of the lengths besides the index tensors has to be true."""
    qo_lengths = problem.qo_lengths()
    longest = int(qo_lengths.max()) if len(qo_lengths) else 0
    if a.seq_lens_q is not None:
        (given,) = host_indices({"seq_lens_q": a.seq_lens_q})
        if not torch.equal(given, qo_lengths):
            raise ValueError("`seq_lens_q` must be the lengths that `qo_indptr` says")
    if a.max_token_per_sequence is not None:
        check_count("max_token_per_sequence", a.max_token_per_sequence, longest)
    if a.max_sequence_kv is not None:
        kv_lengths = problem.kv_lengths()
        check_count(
            "max_sequence_kv", a.max_sequence_kv, int(kv_lengths.max()) if len(kv_lengths) else 0
        )
    if a.uniform_q_len is not None:
        check_count("uniform_q_len", a.uniform_q_len, 0)
        if not bool((qo_lengths == a.uniform_q_len).all()):
            raise ValueError(
                f"`uniform_q_len` must be every request's query length, got {a.uniform_q_len}"
            )
