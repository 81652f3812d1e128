"""Prefills on Hopper whose keys are copied first: out of small pages, or to be rotated.

The kernel for Hopper loads boxes of neighbouring tokens and does not rotate, and the portable one
rotates a key for each tile of queries. A prefill loads each key once for some hundred query rows,
so that one pass more over the keys costs little.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ...jit.attention.config import FLOAT16
from ...jit.attention.gather import get_attention_gather_module
from ...jit.rope import RopeConfig, gen_rope_module
from .choice import is_hopper, possible_backend
from .launch import PlanOptions
from .planner import estimate_kernels
from .requests import ArgumentNames, AttentionProblem, Requests
from .spec import AttentionSpec
from .speeds import COPIES, ROTATING, SPEEDS, are_gathered, kernel_model
from .tiles import HOPPER_PLAN_TILES, hopper_tiles

_ALIGNMENT = 1024  # bytes


class Gathering:
    """Copies before a launch, and the launch that follows.

    Attributes
    ----------
    problem : AttentionProblem
        The launch that follows: the same requests, not rotated, with keys as rows.
    num_bytes : int
        Bytes at the end of the float workspace that hold rows of paged keys and values; 0 for
        ragged ones.
    """

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        spec, requests, tensors = problem
        assert requests.qo_indptr is not None
        lengths = requests.kv_lengths()
        pages = tensors.kv_indices
        self._spec, self._pages, self._page_size = spec, pages, requests.page_size
        self._rotates = spec.pos_encoding_mode == "ROPE_LLAMA"
        token_indptr = requests.kv_indptr
        if pages is not None:
            token_indptr = torch.zeros_like(token_indptr)
            torch.cumsum(lengths, 0, out=token_indptr[1:])
        self.problem = AttentionProblem(
            _rows_of(spec, pages is not None),
            requests._replace(
                argument_names=ArgumentNames.RAGGED,
                kv_indptr=token_indptr,
                kv_len=None,
                last_page_len=None,
                page_size=0,
            ),
            tensors._replace(kv_indices=None),
        )
        offsets = lengths - requests.qo_lengths()  # positions of the first queries
        bounds = torch.cat([token_indptr, requests.kv_indptr, requests.qo_indptr, offsets])
        if device.type == "cuda":
            bounds = bounds.pin_memory().to(device, non_blocking=True)
        count = requests.batch_size + 1
        split = bounds.split([count, count, count, count - 1])
        self._token_indptr, self._page_indptr, self._qo_indptr, self._offsets = split
        self._zeros = torch.zeros(count - 1, dtype=torch.int32, device=device)
        tokens, kv_heads = int(token_indptr[-1]), spec.num_kv_heads
        self._shapes = [(tokens, kv_heads, dim) for dim in (spec.head_dim_qk, spec.head_dim_vo)]
        self.num_bytes = 0
        if pages is not None:
            self.num_bytes = sum(_padded_bytes(shape, spec) for shape in self._shapes)
            self._gather = get_attention_gather_module().attention_gather
        if self._rotates:
            config = RopeConfig(spec.q_data_type, spec.q_data_type, False, computed=True)
            self._rope = gen_rope_module(config).build_and_load().rope

    def fits(self, partial_bytes: int, float_bytes: int) -> bool:
        """Whether a float workspace holds these partial results as well."""
        return not self.num_bytes or partial_bytes + self.num_bytes <= _end_of(float_bytes)

    def place(self, floats: torch.Tensor) -> None:
        """Put the rows at the end of a float workspace."""
        if not self.num_bytes:
            return
        flat = floats.reshape(-1).view(torch.uint8)
        begin = _end_of(flat.numel()) - self.num_bytes
        rows = []
        for shape in self._shapes:
            num_bytes = shape[0] * shape[1] * shape[2] * self._spec.kv_data_type.itemsize
            part = flat[begin : begin + num_bytes]
            rows.append(part.view(self._spec.kv_data_type).view(shape))
            begin += _padded_bytes(shape, self._spec)
        self._rows = rows

    def apply(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Copy and rotate on the current stream; returns the tensors of the launch."""
        is_hnd = self._spec.kv_layout == "HND"
        keys = k
        if self._pages is not None:
            keys, values = self._rows
            self._gather(
                keys, values, k, v, self._pages, self._page_indptr, self._token_indptr,
                self._page_size, is_hnd, None,
            )  # fmt: skip
            is_hnd, k, v = False, keys, values
        if not self._rotates:
            return q, k, v
        rotated_q, rotated_k = torch.empty_like(q), k if self.num_bytes else torch.empty_like(k)
        self._rotate(rotated_q, q, self._qo_indptr, self._offsets)
        out, keys = (rotated_k.transpose(0, 1), k.transpose(0, 1)) if is_hnd else (rotated_k, k)
        self._rotate(out, keys, self._token_indptr, self._zeros)
        return rotated_q, rotated_k, v

    def _rotate(
        self, out: torch.Tensor, x: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Rotate rows [tokens, heads, head_dim]; the kernel takes a second operand, of no heads."""
        spec, none_out, none = self._spec, out[:, :0], x[:, :0]
        self._rope(
            out, none_out, x, none, None, indptr, offsets,
            spec.head_dim_qk, spec.rope_scale, spec.rope_theta, None,
        )  # fmt: skip


def is_worth_gathering(
    problem: AttentionProblem, device: torch.device, options: PlanOptions
) -> bool:
    """Whether copying the keys first takes less time than any kernel without it.

    Never where results must not depend on the batch, nor with a CUDA graph's buffers, whose next
    plan may have more keys.
    """
    spec, requests, tensors = problem
    if not is_hopper(device) or options.capacity is not None:
        return False
    if requests.qo_indptr is None or spec.variant is not None or tensors.rows_as_pages:
        return False
    if not requests.kv_lengths().any():
        return False  # there is nothing to copy
    rotates = spec.pos_encoding_mode == "ROPE_LLAMA"
    rows = _rows_of(spec, requests.page_size > 0)
    backend = possible_backend(rows, device)
    if options.fixed_split_size is not None or (backend == "fa2" and not rotates):
        return False
    if rotates:
        is_rotated_before = spec.backend != "fa3" and spec.q_data_type in FLOAT16
        if not is_rotated_before or spec.kv_data_type != spec.q_data_type:
            return False
        if bool((requests.kv_lengths() < requests.qo_lengths()).any()):
            return False  # a query before the first key has no position
    else:
        page_size = requests.page_size
        # First what needs no planner, whose module may have to be compiled.
        if not any(are_gathered(page_size, tile_kv) for tile_kv in HOPPER_PLAN_TILES):
            return False
        tile_kv = hopper_tiles(
            spec.q_data_type, spec.kv_data_type, spec.head_dim_qk, spec.head_dim_vo
        ).tile_kv
        if not are_gathered(page_size, tile_kv):
            return False
    found = estimate_kernels(kernel_model(_with_known_heads(rows), 0, 0, False, True), requests)
    copied = found.hopper_us if backend != "fa2" else found.portable_us
    if rotates:
        copied = min(copied, found.portable_us)
        others = found.portable_us * ROTATING
    else:
        pages = kernel_model(spec, requests.page_size, 0, False, True)
        others = estimate_kernels(pages, requests).hopper_us
        if spec.backend == "auto":
            others = min(others, found.portable_us)
    return copied + _copies_us(spec, requests, rotates) < others


def _copies_us(spec: AttentionSpec, requests: Requests, rotates: bool) -> float:
    """Microseconds of all that precedes the launch: each byte is read and written."""
    tokens, us = int(requests.kv_lengths().sum()), 0.0
    k_bytes, v_bytes = (
        tokens * spec.num_kv_heads * dim * spec.kv_data_type.itemsize
        for dim in (spec.head_dim_qk, spec.head_dim_vo)
    )
    if requests.page_size:
        us += COPIES.start + 2 * (k_bytes + v_bytes) / COPIES.bytes_per_us
    if rotates:
        row = spec.num_qo_heads * spec.head_dim_qk * spec.q_data_type.itemsize
        q_bytes = requests.num_qo_tokens * row
        us += 2 * COPIES.start + 2 * (q_bytes + k_bytes) / COPIES.bytes_per_us
    return us


@functools.lru_cache(maxsize=64)
def _rows_of(spec: AttentionSpec, paged: bool) -> AttentionSpec:
    """The options of the launch: nothing is rotated, and rows of a copy have the tokens outside."""
    layout = "NHD" if paged else spec.kv_layout
    mode = "NONE" if spec.pos_encoding_mode == "ROPE_LLAMA" else spec.pos_encoding_mode
    return dataclasses.replace(spec, pos_encoding_mode=mode, kv_layout=layout)


@functools.lru_cache(maxsize=64)
def _with_known_heads(spec: AttentionSpec) -> AttentionSpec:
    """The same with the smallest heads that hold its own among those whose times are known."""
    own = spec.head_dim_qk, spec.head_dim_vo
    holding = (dims for dims in SPEEDS if dims[0] >= own[0] and dims[1] >= own[1])
    dim_qk, dim_vo = min(holding, default=max(SPEEDS))
    return dataclasses.replace(spec, head_dim_qk=dim_qk, head_dim_vo=dim_vo)


def _padded_bytes(shape: tuple[int, int, int], spec: AttentionSpec) -> int:
    num_bytes = shape[0] * shape[1] * shape[2] * spec.kv_data_type.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _end_of(float_bytes: int) -> int:
    return float_bytes // _ALIGNMENT * _ALIGNMENT
