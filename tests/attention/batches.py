"""Random batches of attention, and how closely a result must agree with the reference.

The kernel rounds each probability to the type it multiplies with, so an output is off by
sum_j p_j e_j v_j with independent errors |e_j| <= u. Its deviation is at most u sqrt(sum p_j^2
v_j^2), which the reference gives by a second call with doubled logits and squared values: a bound
tight enough to see one wrong key among a thousand. The LSE is accumulated in float32 from exact
products; its bound is a thousandth.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

import flashinfer
from flashinfer.testing import CheckOptions, assert_matches_reference
from flashinfer.testing.numerics import ErrorBound, unit_roundoff
from flashinfer.trace.template import TraceTemplate, resolve_template

WORKSPACE_BYTES = 64 << 20
BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)


def workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def randn(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)


def indptr(lengths: Sequence[int]) -> torch.Tensor:
    """[0, l_0, l_0 + l_1, ...] int32 on the host."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shapes of one batch; what of them selects a kernel is dtypes, head sizes and row counts."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 4
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    page_size: int = 16
    kv_layout: str = "NHD"
    form: str = "tuple"  # of the cache: "tuple", "fused", or "strided" parts of one wider tensor
    seed: int = 1

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def query(self, device: torch.device) -> torch.Tensor:
        shape = (sum(self.qo_lens), self.num_qo_heads, self.head_dim_qk)
        return randn(shape, self.dtype, device, self.seed)

    def dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.dtype, "kv_data_type": self.stored}

    # ---- pages ---------------------------------------------------------------------------------

    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """indptr, indices, last_page_len on the host, and the pages of a cache with some to spare.

        Pages lie in random order; a request of length 0 has none.
        """
        counts = [-(-n // self.page_size) for n in self.kv_lens]
        num_pages = sum(counts) + 3
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed))
        last = [
            n - (c - 1) * self.page_size if c else 0
            for n, c in zip(self.kv_lens, counts, strict=True)
        ]
        indices = order[: sum(counts)].to(torch.int32)
        return indptr(counts), indices, torch.tensor(last, dtype=torch.int32), num_pages

    def cache(self, device: torch.device) -> Any:
        """Keys and values in pages; slots that belong to no request hold NaN."""
        starts, indices, last, num_pages = self.table()
        free = torch.ones(num_pages, self.page_size, dtype=torch.bool)
        for b in range(len(self.kv_lens)):
            pages = indices[starts[b] : starts[b + 1]].long()
            free[pages] = False
            if len(pages):
                free[pages[-1], int(last[b]) :] = True
        parts = []
        for i, head_dim in enumerate((self.head_dim_qk, self.head_dim_vo)):
            shape = (num_pages, self.page_size, self.num_kv_heads, head_dim)
            values = randn(shape, torch.float32, device, self.seed + 7 + i)
            values[free.to(device)] = float("nan")
            stored = values.to(self.stored)
            parts.append(stored if self.kv_layout == "NHD" else stored.transpose(1, 2).contiguous())
        if self.form == "fused":
            return torch.stack(parts, 1)
        if self.form == "strided":
            return tuple(_widened(part) for part in parts)
        return tuple(parts)


def _widened(part: torch.Tensor) -> torch.Tensor:
    """The same values with 16 elements more per row and one page more per page between them."""
    pages, *inner, dim = part.shape
    wide = part.new_empty(2 * pages, *inner, dim + 16)
    wide.view(torch.uint8).fill_(0x7F)  # NaN, or large, in every type
    view = wide[::2, ..., :dim]
    view.copy_(part)
    return view


# ---- wrappers ----------------------------------------------------------------------------------


def plan_decode(batch: Batch, device: torch.device, **options: Any) -> Any:
    """A planned wrapper of one query (or `q_len_per_req`) per request."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), batch.kv_layout)
    starts, indices, last, _ = batch.table()
    assert batch.head_dim_qk == batch.head_dim_vo
    wrapper.plan(
        *(starts, indices.to(device), last, batch.num_qo_heads, batch.num_kv_heads),
        *(batch.head_dim_qk, batch.page_size),
        **batch.dtypes(),
        **options,
    )
    return wrapper


def plan_paged(batch: Batch, device: torch.device, **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), batch.kv_layout)
    starts, indices, last, _ = batch.table()
    wrapper.plan(
        *(indptr(batch.qo_lens), starts, indices.to(device), last),
        *(batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.page_size),
        head_dim_vo=batch.head_dim_vo,
        **batch.dtypes(),
        **options,
    )
    return wrapper


def plan_ragged(batch: Batch, device: torch.device, **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), batch.kv_layout)
    wrapper.plan(
        *(indptr(batch.qo_lens), indptr(batch.kv_lens)),
        *(batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk),
        head_dim_vo=batch.head_dim_vo,
        **batch.dtypes(),
        **options,
    )
    return wrapper


def ragged_kv(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (sum(batch.kv_lens), batch.num_kv_heads)
    k = randn((*rows, batch.head_dim_qk), batch.stored, device, batch.seed + 7)
    v = randn((*rows, batch.head_dim_vo), batch.stored, device, batch.seed + 8)
    if batch.kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return k, v


def check_paged(wrapper: Any, batch: Batch, device: torch.device, **run: Any) -> dict[str, Any]:
    """`run` with and without LSE, against the reference."""
    arguments = {"q": batch.query(device), "paged_kv_cache": batch.cache(device), **run}
    return check(type(wrapper).run, self=wrapper, return_lse=True, **arguments)


def check_ragged(wrapper: Any, batch: Batch, device: torch.device, **run: Any) -> dict[str, Any]:
    k, v = ragged_kv(batch, device)
    arguments = {"q": batch.query(device), "k": k, "v": v, **run}
    return check(type(wrapper).run, self=wrapper, return_lse=True, **arguments)


# ---- bounds ------------------------------------------------------------------------------------


def check(api: Any, **arguments: Any) -> dict[str, Any]:
    """One call against the reference of its template, within the bounds of this module."""
    if not arguments["q"].is_cuda:  # the reference against itself
        return assert_matches_reference(api, **arguments)
    template = resolve_template(api.__flashinfer_trace__, arguments)
    assert template is not None
    return assert_matches_reference(api, AttentionBounds.of(template, arguments), **arguments)


@dataclasses.dataclass(frozen=True)
class _SpreadBound(ErrorBound):
    """An error bound with a part of its own for each element."""

    spread: torch.Tensor | None = None

    def systematic(self, expected: torch.Tensor) -> torch.Tensor:
        assert self.spread is not None
        return super().systematic(expected) + self.spread


@dataclasses.dataclass(frozen=True)
class AttentionBounds(CheckOptions):
    """Bounds of the output and of the LSE of one call."""

    output: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    @classmethod
    def of(cls, template: TraceTemplate, arguments: dict[str, Any]) -> AttentionBounds:
        gathered = template.gathered(arguments)
        output, noise = error_of(template, gathered)
        return cls(output=output, lse=noise)

    def bound_for(self, output: torch.Tensor, arguments: Any) -> ErrorBound:
        if output.dtype == torch.float32:
            return _SpreadBound(0.0, 2.0**-20, 1e-3, spread=self.lse)
        # The output's own rounding; sums in float32 of terms that cancel.
        unit = unit_roundoff(output.dtype)
        return _SpreadBound(1.01 * unit, 2.0**-16, 2.0**-20, spread=self.output)


def error_of(template: TraceTemplate, gathered: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of what rounding of probabilities, and of rotated keys, does to output and LSE."""
    values = "v_cache" if "v_cache" in gathered else "v"
    keys = "k_cache" if "k_cache" in gathered else "k"
    finite = gathered[values].double().nan_to_num(0.0)
    soft_cap = gathered.get("logits_soft_cap")
    doubled = {
        **gathered,
        "sm_scale": 2 * gathered["sm_scale"],
        "logits_soft_cap": 2 * soft_cap if soft_cap else 0.0,
        values: finite.square(),
        "v_scale": 1.0,
    }
    if gathered.get("sinks") is not None:
        doubled["sinks"] = 2 * gathered["sinks"]
    _, lse = _both_results(template, gathered)
    squares, lse_of_squares = _both_results(template, doubled)
    # ALiBi's slopes cannot be doubled: then the largest probability stands for all of them.
    shift = (lse_of_squares - 2 * lse).nan_to_num(0.0).clamp(max=0.0)
    if gathered.get("pos_encoding_mode") == "ALIBI":
        largest = finite.abs().max() if finite.numel() else finite.sum()
        squares, shift = torch.full_like(squares, float(largest) ** 2), shift * 0
    deviation = (squares.clamp(min=0) * torch.exp2(shift)[..., None]).sqrt()

    unit = unit_roundoff(gathered["q"].dtype)
    if gathered[keys].dtype in FLOAT8:
        unit = unit_roundoff(torch.float16)
    logit_error = _rotated_error(gathered, keys)
    factor = (8 * unit + 4 * logit_error) * abs(gathered.get("v_scale", 1.0))
    return factor * deviation, torch.full_like(lse, 2 * logit_error)


def _both_results(template: TraceTemplate, gathered: Any) -> Any:
    """Output and LSE, also where the call returns no LSE."""
    taken = inspect.signature(template.reference).parameters
    return template.reference(**{k: v for k, v in gathered.items() if k in taken})


def _rotated_error(gathered: Any, keys: str) -> float:
    """Deviation of a logit when q and k are rounded again after rotation."""
    if gathered.get("pos_encoding_mode") != "ROPE_LLAMA":
        return 0.0
    q, k = gathered["q"], gathered[keys]
    units = [unit_roundoff(q.dtype), unit_roundoff(k.dtype)]
    # Entries are near N(0, 1): a product's rounding errors add up over sqrt(head_dim).
    return abs(gathered["sm_scale"]) * q.shape[-1] ** 0.5 * (units[0] ** 2 + units[1] ** 2) ** 0.5
