"""Latent attention in one call under random shapes, types, tables and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import mla
from flashinfer.jit import JitSpec
from flashinfer.testing import CheckOptions
from flashinfer.testing.mla import mla_check_options
from flashinfer.trace.arguments import with_defaults
from flashinfer.trace.template import resolve_template
from tests.fuzzing import (
    Family,
    Fault,
    check_fault,
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    with_dtype,
)
from tests.mla.batches import WORKSPACE_BYTES, need_hopper
from tests.mla.test_mla_one_call import scaled_tokens

FUNCTIONS = ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla")
# Columns of latent and rotary rows, types of queries and of the cache; uint8: tokens with scales.
KINDS = (
    (512, 64, torch.bfloat16, torch.bfloat16),
    (512, 64, torch.bfloat16, torch.float8_e4m3fn),
    (512, 64, torch.bfloat16, torch.uint8),
    (512, 64, torch.float16, torch.float16),
    (512, 0, torch.bfloat16, torch.bfloat16),
    (256, 64, torch.bfloat16, torch.bfloat16),
    (256, 0, torch.float16, torch.float16),
)


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    kind: tuple[int, int, torch.dtype, torch.dtype]
    lengths: tuple[tuple[int, int], ...]  # of queries and of keys, for each request
    even: bool  # each request has the queries of the first
    heads: int
    page_size: int
    top_k: int  # tokens that a query sees; 0: all
    top_k_lens: bool
    cache_dim: int | None  # where the cache has a dimension of one
    sinks: bool
    scales: tuple[float, float]
    lse: str | None  # base of the log-sum-exps that are returned
    with_out: bool
    on_host: bool
    seed: int

    @property
    def has_fewer(self) -> bool:
        """Whether the function lacks tokens by number, log-sum-exps and ragged queries."""
        return self.function != FUNCTIONS[0]


CASES = st.builds(
    Case,
    function=st.sampled_from(FUNCTIONS),
    kind=st.sampled_from(KINDS),
    lengths=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 3, 17, 64, 65, 200])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    even=st.booleans(),
    heads=st.sampled_from([1, 2, 12, 16, 20, 40, 96]),
    page_size=st.sampled_from([1, 2, 16, 48, 64, 128]),
    top_k=st.sampled_from([0, 0, 1, 16, 100]),
    top_k_lens=st.booleans(),
    cache_dim=st.sampled_from([None, 1, 2]),
    sinks=st.booleans(),
    scales=st.sampled_from([(192**-0.5, 1.0), (0.02, 0.5), (0.1, 3.0)]),
    lse=st.sampled_from([None, "base2", "basee"]),
    with_out=st.booleans(),
    on_host=st.booleans(),
    seed=st.integers(0, 2**31),
)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    rank, rope, dtype, kv_dtype = case.kind
    even = case.even or case.has_fewer
    q_lens = [case.lengths[0][0] if even else q_len for q_len, _ in case.lengths]
    # The first tokens of a longer draft see nothing: keys are as many as queries.
    kv_lens = [max(n, q) for q, (_, n) in zip(q_lens, case.lengths, strict=True)]
    rows, width = sum(q_lens), max(-(-n // case.page_size) for n in kv_lens) + 1

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    pages = width * len(kv_lens) + 1
    order = torch.randperm(pages, generator=generator, device=device)[:-1]
    shape = (len(q_lens), q_lens[0]) if even else (rows,)
    query = new(*shape, case.heads, rank + rope).to(dtype)
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": _cache(new(pages, case.page_size, rank + rope), dtype, kv_dtype),
        "workspace_buffer": torch.zeros(
            WORKSPACE_BYTES if device.type == "cuda" else 1024, dtype=torch.uint8, device=device
        ),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "block_tables": order.view(-1, width).int(),
        "seq_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "max_seq_len": max(kv_lens),
        "bmm1_scale": case.scales[0],
        "bmm2_scale": case.scales[1],
        "sinks": new(case.heads) * 3 if case.sinks else None,
        "enable_pdl": None,
    }
    if case.with_out:
        out = torch.empty((*shape, case.heads, rank), dtype=dtype, device=device)
        arguments["out"] = out
    if not case.has_fewer:
        arguments |= _of_the_longer_call(case, q_lens, even, arguments, generator)
    if case.cache_dim is not None:
        arguments["kv_cache"] = arguments["kv_cache"].unsqueeze(case.cache_dim)
    if case.on_host:
        for name in ("seq_lens", "sparse_mla_top_k_lens", "cum_seq_lens_q"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].cpu()
    return arguments


def _cache(rows: torch.Tensor, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.Tensor:
    if kv_dtype == torch.uint8:
        return scaled_tokens(rows.to(dtype))[0]
    return rows.to(kv_dtype)


def _of_the_longer_call(
    case: Case,
    q_lens: list[int],
    even: bool,
    arguments: dict[str, Any],
    generator: torch.Generator,
) -> dict[str, Any]:
    """What the function with fewer arguments does not take."""
    query, rows = arguments["query"], sum(q_lens)
    device, more = query.device, {"backend": "auto", "sparse_mla_top_k": 0, "is_var_seq": True}
    if case.lse is not None:
        more |= {"return_lse": True, "return_lse_base": case.lse}
        if case.with_out:
            more["lse"] = torch.empty(rows, case.heads, device=device)
    if not even:
        first = torch.tensor([0, *q_lens], device=device).cumsum(0).int()
        more |= {"cum_seq_lens_q": first, "max_q_len": max(*q_lens, 1)}
    if case.top_k and (even or case.top_k_lens):
        slots = arguments["kv_cache"].shape[0] * case.page_size
        shape = (rows, case.top_k)
        chosen = torch.randint(slots, shape, generator=generator, device=device).int()
        by_request = even and not case.top_k_lens
        more |= {
            "block_tables": chosen.view(*query.shape[:2], case.top_k) if even else chosen,
            "sparse_mla_top_k": case.top_k,
        }
        if not by_request:
            high = case.top_k + 1
            counts = torch.randint(high, (rows,), generator=generator, device=device)
            more["sparse_mla_top_k_lens"] = counts.int()
    return more


def _options(case: Case, arguments: dict[str, Any]) -> CheckOptions | None:
    function = getattr(mla, case.function)
    call = with_defaults(function, arguments)
    template = resolve_template(function.__flashinfer_trace__, call)
    assert template is not None
    return mla_check_options(template, call)


FAULTS: dict[str, Fault] = {
    "query of doubles": replace("query", with_dtype(torch.float64)),
    "query longer": replace("query", longer),
    "query of two dimensions": replace("query", lambda t: t.flatten(0, 2) if t.ndim == 4 else None),
    "kv_cache of doubles": replace("kv_cache", with_dtype(torch.float64)),
    "kv_cache longer": replace("kv_cache", longer),
    "block_tables of long": replace("block_tables", with_dtype(torch.int64)),
    "block_tables longer by a row": replace("block_tables", one_row_more),
    "seq_lens of long": replace("seq_lens", with_dtype(torch.int64)),
    "seq_lens longer": replace("seq_lens", longer),
    "kv_lora_rank of no kernel": put("kv_lora_rank", 384),
    "max_seq_len text": put("max_seq_len", "8"),
    "bmm1_scale negative": put("bmm1_scale", -1.0),
    "bmm2_scale text": put("bmm2_scale", "1"),
    "sinks longer": replace("sinks", longer),
    "sinks of doubles": replace("sinks", with_dtype(torch.float64)),
    "out longer": replace("out", longer),
    "out of doubles": replace("out", with_dtype(torch.float64)),
    "enable_pdl text": put("enable_pdl", "yes"),
    "workspace_buffer missing": put("workspace_buffer", None),
}
LONGER_FAULTS: dict[str, Fault] = {
    "lse longer": replace("lse", longer),
    "lse of doubles": replace("lse", with_dtype(torch.float64)),
    "backend unknown": put("backend", "another"),
    "sparse_mla_top_k negative": put("sparse_mla_top_k", -1),
    "return_lse_base unknown": put("return_lse_base", "ln"),
    "is_var_seq text": put("is_var_seq", "yes"),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`, with every tensor that it may have."""
    case = Case(
        function, KINDS[0], ((2, 9), (2, 70)), True, 12, 16, 0, False, None, True, (0.1, 1.0),
        "base2", True, True, 0,
    )  # fmt: skip
    return build(case, device)


def specs() -> list[JitSpec]:
    """None in advance: a call compiles what it needs."""
    return []


ONE_CALL = Family(
    "latent attention in one call", mla, FUNCTIONS, CASES, build, usual, FAULTS,
    function_faults={FUNCTIONS[0]: LONGER_FAULTS}, options=_options, specs=specs,
)  # fmt: skip
"""Not named FAMILY: without a GPU and the reference backend no kernel refuses a call."""


def test_one_call_is_right_or_refused(fuzz_run):
    need_hopper(fuzz_run.device)
    run_fuzz(ONE_CALL, fuzz_run)


@pytest.mark.parametrize("fault", ONE_CALL.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    need_hopper(device)
    check_fault(ONE_CALL, fault, device)
