"""Cascades, POD, block-sparse matrices and ranges at random: the wrappers that
`test_attention_fuzz` has not. The options that select a module are drawn first, then many batches
for each.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FORMS,
    FP16,
    Batch,
    check,
    check_paged,
    indptr,
    need_backend,
    plan_paged,
    workspace,
)
from tests.attention.packed import block_tables
from tests.attention.test_cascade_attention import Cascade, check_cascade
from tests.attention.test_pod import check_batch_pod, check_pod, plan_batch_pod, plan_pod
from tests.attention.test_sparse import check_bsr, plan_bsr, plan_variable
from tests.fuzzing import fuzz_settings

MODULES, FULL_MODULES = 21, 16 * 7
CASES_PER_MODULE, CPU_CASES_PER_MODULE = 160, 2
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300, 900])
TOKENS = st.sampled_from([0, 1, 1, 2, 5, 17, 64, 70, 130])
MAX_LOGITS = 2**20  # of all requests and heads


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The options that select a module."""

    wrapper: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    head_dim: int
    encoding: str
    window: bool
    soft_cap: bool
    backend: str
    encoding_p: str  # of the prefill, where it has options of its own
    window_p: bool


def draw_kernel(index: int) -> Kernel:
    """The kernel number `index`: the same in every run."""
    rng = random.Random(f"kernel of a wrapper {index}")
    wrapper = list(CHECKS)[index % len(CHECKS)]
    pod = "pod" in wrapper
    backend = rng.choice(["auto", "fa2"] if pod else ["auto", "fa2", "fa3"])
    encodings = ["NONE", "NONE", "ROPE_LLAMA", "ALIBI"] if pod else ["NONE"]
    encoding = rng.choice(encodings)
    dtype = o_dtype = rng.choice([BF16, FP16])
    shares_keys = pod or wrapper in ("cascade", "device_lengths")
    if shares_keys and rng.random() < 0.4:
        dtype = rng.choice([E4M3, E5M2])
    head_dims = [64, 128] if backend == "fa3" else [16, 64, 80, 128, 256, 512]
    return Kernel(
        wrapper=wrapper,
        dtype=dtype,
        kv_dtype=rng.choice([dtype, E4M3]) if shares_keys else dtype,
        o_dtype=o_dtype,
        head_dim=rng.choice(head_dims),
        encoding=encoding,
        window=rng.random() < 0.4 and shares_keys,
        soft_cap=rng.random() < 0.3 and not pod and wrapper != "device_lengths",
        backend=backend,
        encoding_p=rng.choice(encodings),
        window_p=rng.random() < 0.4,
    )


def options_of(draw: st.DrawFn, kernel: Kernel) -> dict[str, Any]:
    options: dict[str, Any] = {"sm_scale": draw(st.sampled_from([None, 0.1, 0.3, -0.1]))}
    if kernel.encoding != "NONE":
        options["pos_encoding_mode"] = kernel.encoding
    if kernel.window:
        options["window_left"] = draw(st.sampled_from([0, 1, 20, 64, 500]))
    if kernel.soft_cap:
        options["logits_soft_cap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    return options


def heads_of(draw: st.DrawFn) -> tuple[int, int]:
    group, kv_heads = draw(st.sampled_from([1, 2, 3, 4, 7, 8])), draw(st.integers(1, 3))
    return group * kv_heads, kv_heads


def lengths(draw: st.DrawFn, queries: Any, heads: int, least: int = 0) -> Any:
    """Tokens of queries and keys of some requests."""
    count = draw(st.integers(least, 5))
    qo = [draw(queries) for _ in range(count)]
    kv = [draw(LENGTHS) for _ in range(count)]
    while sum(q * k for q, k in zip(qo, kv, strict=True)) * heads > MAX_LOGITS:
        kv = [n // 2 for n in kv]
    return qo, kv


def cascade(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    """Levels from the own keys of each request up: neighbours share those above."""
    heads = heads_of(draw)
    qo, kv = lengths(draw, TOKENS, heads[0], least=1)
    levels = [list(zip(qo, kv, strict=True))]
    for _ in range(0 if kernel.window else draw(st.integers(0, 2))):  # refused on several levels
        merged: list[tuple[int, int]] = []
        for tokens, _ in levels[0]:
            if merged and draw(st.booleans()):
                merged[-1] = (merged[-1][0] + tokens, merged[-1][1])
            else:
                merged.append((tokens, draw(LENGTHS)))
        levels.insert(0, merged)
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    plan = Cascade(levels, device, (*heads, kernel.head_dim, page_size))
    options = {"causal": draw(st.booleans()), **options_of(draw, kernel)}
    dtypes = (kernel.dtype, kernel.kv_dtype)
    wrapper = plan.plan(*dtypes, kernel.backend, o_data_type=kernel.o_dtype, **options)
    scales = scales_of(draw, *heads, device, "")
    check_cascade(wrapper, *plan.tensors(*dtypes), **scales)


def batch_of(draw: st.DrawFn, kernel: Kernel, queries: Any, shape: dict[str, Any]) -> Batch:
    qo, kv = lengths(draw, queries, shape["num_kv_heads"] * shape["group"])
    return Batch(
        tuple(qo),
        tuple(kv),
        head_dim_qk=kernel.head_dim,
        head_dim_vo=kernel.head_dim,
        dtype=kernel.dtype,
        kv_dtype=kernel.kv_dtype,
        o_dtype=kernel.o_dtype,
        seed=draw(st.integers(0, 2**20)),
        **shape,
    )


def shape_of(draw: st.DrawFn) -> dict[str, Any]:
    heads, kv_heads = heads_of(draw)
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    forms = [*FORMS, "tokens"] if page_size == 1 else [*FORMS]
    return {
        "num_kv_heads": kv_heads,
        "group": heads // kv_heads,
        "page_size": page_size,
        "kv_layout": draw(st.sampled_from(["NHD", "HND"])),
        "form": draw(st.sampled_from(forms)),
    }


def run_of(draw: st.DrawFn, shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    kv_heads = shape["num_kv_heads"]
    heads = (kv_heads * shape["group"], kv_heads)
    scales = [scales_of(draw, *heads, device, suffix) for suffix in ("", "_p")]
    return {"causal_p": draw(st.booleans()), **scales[0], **scales[1]}


def scales_of(
    draw: st.DrawFn, qo_heads: int, kv_heads: int, device: torch.device, suffix: str
) -> dict[str, Any]:
    """Scales of queries, keys and values: none, numbers, or tensors of one value or of each head.

    They are at most 1: bounds of cascades are for outputs of ordinary size.
    """
    scales: dict[str, Any] = {}
    for name, heads in (("q", qo_heads), ("k", kv_heads), ("v", kv_heads)):
        kind = draw(st.sampled_from(["none", "number", "one", "heads"]))
        if kind == "number":
            scales[f"{name}_scale{suffix}"] = draw(st.sampled_from([1.0, 0.5, 0.3]))
        elif kind != "none":
            values = torch.linspace(0.4, 1.0, heads if kind == "heads" else 1)
            scales[f"{name}_scale{suffix}"] = values.to(device)
    return scales


def pod(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    shape = shape_of(draw)
    batch = batch_of(draw, kernel, st.just(1), shape)
    qo_len, kv_len = draw(TOKENS), draw(LENGTHS)
    layout = draw(st.sampled_from(["NHD", "HND"]))
    options, run = options_of(draw, kernel), run_of(draw, shape, device)
    window = draw(st.sampled_from([0, 1, 20, 64, 500])) if kernel.window_p else -1
    given = {
        "window_left_p": window,
        "pos_encoding_mode_p": kernel.encoding_p,
        "sm_scale_p": draw(st.sampled_from([options["sm_scale"], None, 0.2, -0.1])),
        "rope_scale_p": draw(st.sampled_from([None, 4.0])),
        "kv_layout_p": layout,
        "kv_layout_d": batch.kv_layout,
        "window_left_d": options.get("window_left", -1),
        "pos_encoding_mode_d": options.get("pos_encoding_mode", "NONE"),
        "sm_scale_d": options["sm_scale"],
    }
    wrapper = plan_pod(batch, device, **options)
    check_pod(wrapper, batch, device, (qo_len, kv_len), **run, **given)


def batch_pod(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    shape = shape_of(draw)
    prefill = batch_of(draw, kernel, TOKENS, shape)
    decode = batch_of(draw, kernel, st.integers(0, 3), shape)
    wrapper = plan_batch_pod(prefill, decode, device, **options_of(draw, kernel))
    check_batch_pod(wrapper, prefill, decode, device, **run_of(draw, shape, device))


def block_sparse(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    blocks = [(1, 1), (1, 8), (3, 5), (16, 16), (64, 32), (128, 64)]
    rows, columns = draw(st.sampled_from(blocks))
    many = 60 // rows + 4
    sizes = (draw(st.integers(1, many)) * rows, draw(st.integers(1, many)) * columns, rows, columns)
    wrapper, tensors = plan_bsr(
        sizes,
        device,
        density=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        heads=(*heads_of(draw), kernel.head_dim),
        dtype=kernel.dtype,
        backend=kernel.backend,
        **draw(st.sampled_from([{}, {"causal": True}, {"mask": True}])),
        **options_of(draw, kernel),
    )
    check_bsr(wrapper, tensors)


def variable_blocks(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    sizes = st.lists(st.sampled_from([0, 1, 7, 16, 50, 64, 130]), min_size=1, max_size=6)
    rows, columns = (tuple(draw(sizes.filter(any))) for _ in range(2))
    wrapper, tensors = plan_variable(
        device,
        heads=(*heads_of(draw), kernel.head_dim),
        rows=rows,
        columns=columns,
        dtype=kernel.dtype,
        backend=kernel.backend,
        causal=draw(st.booleans()),
        **options_of(draw, kernel),
    )
    check(type(wrapper).run, self=wrapper, return_lse=True, **tensors)


def ranges(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    """Ranges of any place and length, for each query another."""
    batch = batch_of(draw, kernel, TOKENS, shape_of(draw))
    sizes = {"head_dim_qk": batch.head_dim_qk, "head_dim_vo": batch.head_dim_vo}
    wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(device), batch.kv_layout, **batch.dtypes(), **sizes
    )
    starts, pages, last, _ = batch.table()
    heads = (batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.page_size)
    scale = options_of(draw, kernel)["sm_scale"]
    table = (indptr(batch.qo_lens), starts, pages.to(device), last)
    wrapper.plan(*table, *heads, sm_scale=scale)
    generator = torch.Generator().manual_seed(batch.seed)
    first = torch.randint(-9, 400, (sum(batch.qo_lens), 1), generator=generator)
    length = torch.randint(-2, 200, first.shape, generator=generator)
    windows = {
        f"{kind}_window_left": draw(st.sampled_from([-1, 0, 5, 64, 500]))
        for kind in ("causal", "range")
    }
    both = torch.cat([first, first + length], 1).to(device, torch.int32)
    check_paged(wrapper, batch, device, bidirectional_ranges=both, **windows)


def device_lengths(draw: st.DrawFn, kernel: Kernel, device: torch.device) -> None:
    """Functions that find block tables and lengths on the GPU, beside a plan made on the host."""
    tokens, shape = draw(st.sampled_from([1, 1, 2, 5, 16])), shape_of(draw)
    batch = batch_of(draw, kernel, st.just(tokens), {**shape, "form": "tuple"})
    if not batch.qo_lens:
        return
    window = draw(st.sampled_from([-1, 0, 20, 500])) if kernel.window else -1
    sinks = None
    if draw(st.booleans()):
        sinks = torch.linspace(-2.0, 3.0, batch.num_qo_heads, device=device)
    scale, v_scale = draw(st.sampled_from([0.1, 0.3])), draw(st.sampled_from([1.0, 0.5]))
    host = plan_paged(batch, device, "fa2", causal=True, sm_scale=scale, window_left=window)
    q, cache = batch.query(device), batch.cache(device)
    expected = host.run(q, cache, v_scale=v_scale, sinks=sinks)
    options = {"window_left": window, "sinks": sinks, "q_len_per_req": tokens}
    # Elements that no request has are read by nobody.
    for function in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        found = function(
            *(q, cache, workspace(device)),
            **block_tables(batch, device),
            max_seq_len=max(1, *batch.kv_lens),
            bmm1_scale=scale,
            bmm2_scale=v_scale,
            out=torch.empty_like(expected),
            kv_layout=batch.kv_layout,
            **options,
        )
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.016, atol=4e-3)


CHECKS: dict[str, Callable[[st.DrawFn, Kernel, torch.device], None]] = {
    "cascade": cascade,
    "pod": pod,
    "batch_pod": batch_pod,
    "block_sparse": block_sparse,
    "variable_blocks": variable_blocks,
    "ranges": ranges,
    "device_lengths": device_lengths,
}


@pytest.mark.parametrize("index", range(FULL_MODULES))
def test_wrappers_are_right(index, device, full):
    if not full and (index >= MODULES or device.type == "cuda"):
        pytest.skip("more kernels, and those of a GPU, under --full")
    kernel = draw_kernel(index)
    need_backend(kernel.backend, device)
    examples = CPU_CASES_PER_MODULE if device.type == "cpu" else CASES_PER_MODULE

    @fuzz_settings(examples)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        CHECKS[kernel.wrapper](data.draw, kernel, device)

    run()
