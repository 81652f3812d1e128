"""All options and shapes at random: a call is right, or refused by name.

What selects a kernel is drawn first, and then many batches for each: modules take seconds to
compile, batches milliseconds to run.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.jit.attention import hopper
from tests.attention.batches import BF16, E4M3, E5M2, FORMS, FP16, Batch, need_backend, randn
from tests.attention.calls import FUNCTIONS, MIXED, WRAPPERS, Call, make_call, refusal_of
from tests.attention.faults import FAULTS
from tests.attention.packed import PACKED
from tests.fuzzing import fuzz_settings

MODULES, CASES_PER_MODULE = 12, 25
FULL_MODULES, FULL_CASES_PER_MODULE = 126, 80
HOPPER_MODULES, FULL_HOPPER_MODULES = 8, 126
CPU_CASES_PER_MODULE = 5
PATHS = (*WRAPPERS, *MIXED, *FUNCTIONS)
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 300, 511, 900)
MAX_LOGITS = 2**20  # of all heads and requests


@dataclass(frozen=True)
class Kernel:
    """The options that select a module."""

    path: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    head_dims: tuple[int, int]
    mask: str  # "none", "causal", "custom", "packed" (bits of a custom mask), "items" (multi-item)
    encoding: str
    window: bool
    soft_cap: bool
    sinks: bool
    rows: str  # query rows of a tile: "few" (up to 16), "some" (up to 64), "many"
    backend: str  # "auto", or another where there is more than that
    page_size: int = 0  # 0: any
    head_scales: bool = False  # scales are tensors


def draw_kernel(index: int) -> Kernel:
    """The kernel number `index`: the same in every run."""
    rng = random.Random(f"kernel {index}")
    path = PATHS[index % len(PATHS)]
    dtype = rng.choice([BF16, FP16])
    head_dim = rng.choice([16, 32, 48, 64, 64, 80, 96, 112, 128, 128, 128, 160, 192, 256, 448, 512])
    pairs = [(head_dim, head_dim)]
    if path in ("paged", "ragged", "mixed") and head_dim > 256:
        pairs += [(head_dim, 256), (head_dim, 320)]
    elif path in ("paged", "ragged", "mixed"):
        pairs += [(192, 128), (head_dim, rng.choice([16, 64, 128, 208]))]
    encoding = rng.choice(["NONE", "NONE", "ROPE_LLAMA", "ALIBI"]) if path != "mixed" else "NONE"
    of_8_bits = path in ("decode", "paged", "ragged") and rng.random() < 0.15
    if of_8_bits:
        dtype = rng.choice([E4M3, E5M2])
    masks = ["none"] if "decode" in path else ["none", "causal", "causal"]
    if path in ("paged", "ragged", "single_prefill"):
        masks += ["custom", "packed"]
    if path in ("paged", "ragged"):
        masks += ["items"]
    return Kernel(
        path=path,
        dtype=dtype,
        kv_dtype=rng.choice([dtype, dtype, E4M3, E5M2]),
        o_dtype=_output_dtype(rng, dtype) if path in WRAPPERS else dtype,
        head_dims=rng.choice(pairs),
        mask=rng.choice(masks),
        encoding=encoding,
        window=rng.random() < 0.3 and path != "mixed",
        soft_cap=rng.random() < 0.3,
        sinks=rng.random() < 0.3 and path in ("decode", "paged"),
        rows=rng.choice(["few", "some", "many"]),
        backend=rng.choice(["auto", "auto", "fa2"]),
    )


def _output_dtype(rng: random.Random, dtype: torch.dtype) -> torch.dtype:
    return rng.choice([dtype, dtype, BF16, FP16] if dtype in (BF16, FP16) else [BF16, FP16])


def draw_hopper_kernel(index: int) -> Kernel:
    """The same for backend fa3: what it lacks is replaced by what it has."""
    paths = ("paged", "ragged", "single_prefill", "mixed")
    path = paths[index % len(paths)]
    kernel = draw_kernel((FULL_MODULES + index) * len(PATHS) + PATHS.index(path))
    rng = random.Random(f"kernel for Hopper {index}")
    head_dims = rng.choice(hopper.HEAD_DIMS)
    of_8_bits = path in ("paged", "ragged") and rng.random() < 0.3
    dtype = rng.choice([E4M3, E4M3, E5M2]) if of_8_bits else kernel.dtype
    return dataclasses.replace(
        kernel,
        dtype=dtype,
        kv_dtype=rng.choice([dtype, E4M3, E5M2]),
        o_dtype=_output_dtype(rng, dtype) if path in WRAPPERS else dtype,
        head_dims=head_dims,
        encoding=kernel.encoding.replace("ROPE_LLAMA", "NONE"),
        backend="fa3",
    )


@dataclass(frozen=True)
class Case:
    """One batch and the options that select no kernel."""

    batch: Batch
    plan: dict[str, Any]
    run: dict[str, Any]
    with_out: bool
    with_lse: bool
    return_lse: bool
    int64: bool
    seed: int


def _query_lengths(draw: st.DrawFn, kernel: Kernel, group: int, count: int) -> list[int]:
    if kernel.rows == "few":
        return [draw(st.integers(0, max(16 // group, 1))) for _ in range(count)]
    if kernel.rows == "some":
        return [draw(st.integers(0, max(64 // group, 1))) for _ in range(count)]
    return [draw(st.integers(65, 200)) // group + 64 // group + 1 for _ in range(count)]


@st.composite
def cases(draw: st.DrawFn, kernel: Kernel) -> Case:
    is_decode = "decode" in kernel.path
    few = kernel.rows == "few"
    groups = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16] if few else [1, 2, 4, 5, 7, 8, 20, 64]
    group = draw(st.sampled_from(groups))
    count = 1 if kernel.path in FUNCTIONS else draw(st.integers(0, 6))
    per_request = draw(st.sampled_from([1, 1, 2, 5])) if kernel.path == "decode" else 1
    kv_lens = [draw(st.sampled_from(LENGTHS)) for _ in range(count)]
    if is_decode:
        qo_lens = [per_request] * count
    else:
        qo_lens = _query_lengths(draw, kernel, group, count)
    heads = draw(st.integers(1, 4))
    while sum(q * k for q, k in zip(qo_lens, kv_lens, strict=True)) * heads * group > MAX_LOGITS:
        kv_lens = [n // 2 for n in kv_lens]
    page_size = kernel.page_size or draw(st.sampled_from([1, 2, 3, 5, 7, 8, 16, 32, 64, 100]))
    forms = [*(FORMS if kernel.head_dims[0] == kernel.head_dims[1] else ("tuple",))]
    has_token_form = page_size == 1 and kernel.kv_dtype != PACKED
    batch = Batch(
        tuple(qo_lens),
        tuple(kv_lens),
        num_kv_heads=heads,
        group=group,
        head_dim_qk=kernel.head_dims[0],
        head_dim_vo=kernel.head_dims[1],
        dtype=kernel.dtype,
        kv_dtype=kernel.kv_dtype,
        page_size=page_size,
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        form=draw(st.sampled_from([*forms, "tokens"] if has_token_form else forms)),
        seed=draw(st.integers(0, 2**20)),
    )
    return Case(
        batch=batch,
        plan=_plan_options(draw, kernel, per_request),
        run=_run_options(draw, kernel),
        with_out=kernel.path in WRAPPERS and draw(st.booleans()),
        with_lse=kernel.path in WRAPPERS and draw(st.booleans()),
        return_lse=draw(st.sampled_from([True, True, False])),
        int64=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


def _plan_options(draw: st.DrawFn, kernel: Kernel, per_request: int) -> dict[str, Any]:
    root = kernel.head_dims[0] ** -0.5
    scales = [None, root, 2 * root, -root, 0.0]
    options: dict[str, Any] = {"sm_scale": draw(st.sampled_from(scales))}
    if kernel.path == "mixed":
        options["causal"] = kernel.mask == "causal"
        options["o_data_type"] = kernel.o_dtype
        if kernel.soft_cap:
            options["logits_soft_cap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
        return options
    options["pos_encoding_mode"] = kernel.encoding
    if kernel.encoding == "ROPE_LLAMA" or draw(st.booleans()):
        options["rope_scale"] = draw(st.sampled_from([None, 1.0, 4.0, 0.5]))
        options["rope_theta"] = draw(st.sampled_from([None, 1e4, 5e5]))
    if kernel.mask in ("causal", "items"):
        options["causal"] = True
    if kernel.window:
        options["window_left"] = draw(st.sampled_from([0, 1, 5, 63, 64, 100, 1000]))
    if kernel.soft_cap:
        options["logits_soft_cap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    if kernel.path in WRAPPERS:
        options["o_data_type"] = kernel.o_dtype
        options["non_blocking"] = draw(st.booleans())
        options["disable_split_kv"] = draw(st.booleans())
        if kernel.path == "decode":
            options["q_len_per_req"] = per_request
        if kernel.path == "decode" or kernel.rows == "some":
            options["fixed_split_size"] = draw(st.sampled_from([None, 64, 100, 256]))
    return options


def _run_options(draw: st.DrawFn, kernel: Kernel) -> dict[str, Any]:
    scale = st.sampled_from([None, 1.0, 0.5, 2.0])
    options: dict[str, Any] = {"k_scale": draw(scale), "v_scale": draw(scale)}
    if kernel.path != "single_prefill":
        options["q_scale"] = draw(scale)
    if kernel.path in WRAPPERS:
        options["enable_pdl"] = draw(st.sampled_from([None, True, False]))
    return options


def build(kernel: Kernel, case: Case, device: torch.device) -> Call:
    """The call of a case."""
    batch, plan, run = case.batch, dict(case.plan), dict(case.run)
    if kernel.path == "mixed":
        run["logits_soft_cap"] = plan.get("logits_soft_cap", 0.0)
    else:
        run["return_lse"] = case.return_lse
    tokens = sum(batch.qo_lens)
    if kernel.mask in ("custom", "packed"):
        plan |= _mask(kernel, case, device)
    if kernel.mask == "items":
        plan |= _items(case, device)
    if kernel.head_scales:
        run |= _head_scales(run, batch, device)
    if kernel.sinks:
        run["sinks"] = 2 * randn((batch.num_qo_heads,), torch.float32, device, case.seed)
    if case.with_out:
        shape = (tokens, batch.num_qo_heads, batch.head_dim_vo)
        run["out"] = torch.empty(shape, dtype=kernel.o_dtype, device=device)
    if case.with_lse:
        run["lse"] = torch.empty(tokens, batch.num_qo_heads, device=device)
    call = make_call(kernel.path, batch, device, **plan)
    if kernel.path in ("paged", "ragged", "mixed"):
        call = call.with_make(backend=kernel.backend)
    elif kernel.path == "single_prefill":
        run["backend"] = kernel.backend
    if case.int64:
        wider = {n: t.long() for n, t in call.plan.items() if _is_int32(t)}
        call = call.with_plan(**wider)
    return call.with_run(**run)


def _head_scales(run: dict[str, Any], batch: Batch, device: torch.device) -> dict[str, Any]:
    """Tensors in place of the scales: a value per head, or one."""
    rng = random.Random(batch.seed)
    heads = {"q_scale": batch.num_qo_heads, "k_scale": batch.num_kv_heads}
    heads["v_scale"] = batch.num_kv_heads
    return {
        name: torch.rand(rng.choice([1, heads[name]]), device=device) + 0.5
        for name in heads
        if name in run and rng.random() < 0.8
    }


def _mask(kernel: Kernel, case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """A random mask, as bools or as bits."""
    batch = case.batch
    sizes = [q * k for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    mask = randn((sum(sizes),), torch.float32, device, case.seed) > 0
    if kernel.mask == "custom":
        single = kernel.path in FUNCTIONS
        return {"custom_mask": mask.view(*batch.qo_lens, *batch.kv_lens) if single else mask}
    bits = torch.zeros(sum(-(-size // 8) * 8 for size in sizes), dtype=torch.uint8, device=device)
    to = 0
    for size, part in zip(sizes, mask.split(sizes), strict=True):
        bits[to : to + size] = part
        to += -(-size // 8) * 8
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=device)
    return {"packed_custom_mask": (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)}


def _items(case: Case, device: torch.device) -> dict[str, Any]:
    """Items of random lengths, with a delimiter before each, after random prefixes."""
    rng, rows, prefixes = random.Random(case.seed), [], []
    for kv_len in case.batch.kv_lens:
        prefixes.append(rng.randint(0, kv_len))
        row: list[int] = []
        while len(row) < kv_len - prefixes[-1]:
            row += range(rng.randint(1, 80))
        rows.append(row[: kv_len - prefixes[-1]])
    length = max([len(row) for row in rows] + [0]) + rng.randint(1, 5)
    table = torch.tensor([row + [0] * (length - len(row)) for row in rows]).view(-1)
    longest = torch.tensor([max(row, default=0) for row in rows])
    return {
        "prefix_len_ptr": torch.tensor(prefixes, device=device).to(torch.uint32),
        "token_pos_in_items_ptr": table.to(device=device, dtype=torch.uint16),
        "token_pos_in_items_len": length,
        "max_item_len_ptr": longest.to(device=device, dtype=torch.uint16),
    }


def _is_int32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int32


def numbers(count: int, full: int) -> list[Any]:
    """Numbers of kernels, of which the first `count` are drawn by default."""
    return [*range(count), *(pytest.param(i, marks=pytest.mark.full) for i in range(count, full))]


@pytest.mark.parametrize("index", numbers(MODULES, FULL_MODULES))
def test_attention_is_right_or_refused(index, device, full):
    fuzz(draw_kernel(index), device, full)


@pytest.mark.parametrize("index", numbers(HOPPER_MODULES, FULL_HOPPER_MODULES))
def test_the_kernel_for_hopper_is_right_or_refused(index, device, full):
    need_backend("fa3", device)
    if device.type == "cpu" and not full:
        pytest.skip("needs a GPU: without one, fa3 is the same reference as fa2")
    fuzz(draw_hopper_kernel(index), device, full)


def fuzz(kernel: Kernel, device: torch.device, full: bool) -> None:
    """Random batches for one module."""
    examples = FULL_CASES_PER_MODULE if full else CASES_PER_MODULE
    faults = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(list(FAULTS)))
    run_cases(kernel, device, CPU_CASES_PER_MODULE if device.type == "cpu" else examples, faults)


def run_cases(
    kernel: Kernel, device: torch.device, examples: int, faults: st.SearchStrategy[str | None]
) -> None:
    """Calls of a module: right, or, with a fault, refused by name."""
    tally: Counter[str] = Counter()

    @fuzz_settings(examples)
    @given(case=cases(kernel), fault=faults)
    def run(case: Case, fault: str | None) -> None:
        call = build(kernel, case, device)
        changed = FAULTS[fault].change(call) if fault is not None else None
        if fault is None or changed is None or kernel.path == "mixed":  # has tests of its own
            call.check()
            tally["right"] += 1
        else:
            refusal_of(changed, FAULTS[fault].names)
            tally["refused"] += 1

    run()
    assert tally.total() >= examples and tally["right"]
