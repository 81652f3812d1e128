"""Which options and wrappers the kernel for Hopper serves: the tables of docs/attention.md hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import choice as backends
from flashinfer._attention.plan.choice import choose_kernel
from flashinfer._attention.plan.requests import CustomMask, ItemScoring
from flashinfer.jit.attention import hopper
from flashinfer.reference_backend import reference_backend
from tests.unit.test_attention_backend_plans import workspace
from tests.unit.test_attention_backends import (
    BF16,
    CUDA,
    E4M3,
    E5M2,
    FP16,
    KEY_HOOK,
    NO_SOFTMAX,
    QUERY_HOOK,
    problem,
    variant,
)

DOCUMENT = Path(flashinfer.__file__).parents[1] / "docs" / "attention.md"
ITEMS = torch.zeros(4, dtype=torch.int32)


def pages_of(size: int) -> dict[str, Any]:
    count = -(-8192 // size)
    return {
        "kv_indptr": torch.tensor([0, count], dtype=torch.int32),
        "kv_indices": torch.arange(count, dtype=torch.int32),
        "kv_len": torch.tensor([8192], dtype=torch.int32),
        "last_page_len": None,
        "page_size": size,
    }


# The document's names, and the fields of a problem of one long request.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "causal, full": [{"causal": True}, {}],
    "window": [{"causal": True, "window_left": 700}, {"window_left": 700}],
    "soft cap": [{"logits_soft_cap": 3.0}],
    "custom mask, of bools or packed": [{"mask": CustomMask(ITEMS, ITEMS)}],
    "multi-item scoring": [
        {"causal": True, "mask": ItemScoring(ITEMS, ITEMS, 4, ITEMS)},
    ],
    "ALiBi": [{"pos_encoding_mode": "ALIBI", "alibi_slopes": ITEMS}],
    "RoPE in the kernel": [{"pos_encoding_mode": "ROPE_LLAMA"}],
    "users' variants": [{"variant": variant()}],
    "users' variants without softmax": [{"variant": variant(NO_SOFTMAX)}],
    "users' variants with QueryTransform or KeyTransform": [
        {"variant": variant(QUERY_HOOK)},
        {"variant": variant(KEY_HOOK)},
    ],
    "pages of 8, 16, 32, 64, 128, 256, ... tokens": [
        pages_of(size) for size in (8, 16, 32, 64, 128, 256)
    ],
    "pages of other sizes": [pages_of(size) for size in (1, 3, 24, 100, 192)],
    "`NHD`, `HND`": [{"kv_layout": "NHD"}, {"kv_layout": "HND"}],
    "float16, bfloat16": [
        {"q_data_type": FP16, "kv_data_type": FP16, "o_data_type": o} for o in (FP16, BF16)
    ],
    "float8_e4m3fn or float8_e5m2 keys of 16-bit queries": [
        {"kv_data_type": E4M3},
        {"kv_data_type": E5M2},
    ],
    "queries, keys and values of 8 bits": [
        {"q_data_type": q, "kv_data_type": kv} for q, kv in ((E4M3, E4M3), (E5M2, E4M3))
    ],
    "head sizes 64, 96, 128, 192/128, 256": [
        {"head_dim_qk": qk, "head_dim_vo": vo} for qk, vo in hopper.HEAD_DIMS
    ],
    "other head sizes": [
        {"head_dim_qk": qk, "head_dim_vo": vo} for qk, vo in ((80, 80), (128, 64), (512, 512))
    ],
}


def documented(header: str) -> dict[str, str]:
    """The table of the document under a header: second cells by first ones."""
    text = DOCUMENT.read_text().split(header + "\n", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[1:]]
    return dict(rows)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "is_hopper", lambda device: True)


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_document_says_what_auto_takes_for_an_option(name: str):
    """And forcing the kernel where it has none is refused, by what it lacks."""
    expected = documented("| option | `auto` on long prompts |")[name]
    is_served = expected != "`fa2`"
    for fields in OPTIONS[name]:
        chosen = choose_kernel(problem([8192], **fields), CUDA).backend
        assert expected.startswith(f"`{chosen}`"), fields
        forced = problem([8192], backend="fa3", **fields)
        if is_served:
            assert choose_kernel(forced, CUDA).backend == "fa3"
            continue
        with pytest.raises(ValueError, match="`backend` must be .*'fa2', got 'fa3', which lacks"):
            choose_kernel(forced, CUDA)


def test_every_option_of_the_document_is_tested():
    assert set(documented("| option | `auto` on long prompts |")) == set(OPTIONS)


# ---- Wrappers ----

TOKENS = 300
INDPTR = torch.tensor([0, TOKENS], dtype=torch.int32)
PAGES = torch.arange(TOKENS, dtype=torch.int32)
LAST = torch.ones(1, dtype=torch.int32)
HEADS = (8, 2, 128)


def plan_ragged(backend: str) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)
    wrapper.plan(INDPTR, INDPTR, *HEADS, q_data_type=BF16)
    return wrapper


def plan_paged(backend: str) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
    wrapper.plan(INDPTR, INDPTR, PAGES, LAST, *HEADS, 1, q_data_type=BF16)
    return wrapper


def plan_sinks(backend: str) -> Any:
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), backend=backend)
    wrapper.plan(INDPTR, INDPTR, PAGES, LAST, *HEADS, 1)
    return wrapper


def plan_mixed(backend: str) -> Any:
    """A prompt and two requests that decode."""
    wrapper = flashinfer.BatchAttention(device="cpu", backend=backend)
    lengths = torch.tensor([TOKENS, 20, 70], dtype=torch.int32)
    kv_indptr = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    qo_indptr = torch.tensor([0, TOKENS, TOKENS + 1, TOKENS + 2], dtype=torch.int32)
    pages = torch.arange(int(kv_indptr[-1]), dtype=torch.int32)
    wrapper.plan(qo_indptr, kv_indptr, pages, lengths, *HEADS, 128, 1)
    return wrapper


def plan_cascade(backend: str) -> Any:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), backend=backend)
    tables = ([x, x] for x in (INDPTR, INDPTR, PAGES, LAST))
    wrapper.plan(*tables, *HEADS, 1, q_data_type=BF16)
    assert len({level._executor.config for level in wrapper._wrappers}) == 1
    return wrapper._wrappers[0]


def plan_sparse(backend: str) -> Any:
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(), backend=backend)
    rows = torch.tensor([0, 1, 2], dtype=torch.int32)
    blocks = torch.tensor([0, 1], dtype=torch.int32)
    wrapper.plan(rows, blocks, 512, 512, 256, 256, *HEADS, q_data_type=BF16)
    return wrapper


def plan_variable(backend: str) -> Any:
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(), backend=backend)
    sizes = torch.tensor([[256, 256]] * 2)
    wrapper.plan(torch.eye(2).bool().expand(2, 2, 2), sizes, sizes, *HEADS, q_data_type=BF16)
    return wrapper


WRAPPERS: dict[str, Callable[[str], Any]] = {
    "BatchPrefillWithRaggedKVCacheWrapper": plan_ragged,
    "BatchPrefillWithPagedKVCacheWrapper": plan_paged,
    "BatchAttentionWithAttentionSinkWrapper": plan_sinks,
    "BatchAttention": plan_mixed,
    "MultiLevelCascadeAttentionWrapper": plan_cascade,
    "BlockSparseAttentionWrapper": plan_sparse,
    "VariableBlockSparseAttentionWrapper": plan_variable,
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_take_what_is_forced(name: str):
    with reference_backend():
        for backend in ("fa2", "fa3"):
            config = WRAPPERS[name](backend)._executor.config
            assert config.backend == backend
            two_shapes = (name, backend) == ("BatchAttention", "fa2")
            assert config.tile_q_second == (16 if two_shapes else 0)
        with pytest.raises(ValueError, match="`backend`.*'fa4'"):
            WRAPPERS[name]("fa4")
    assert f"`{name}`" in DOCUMENT.read_text()


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"q_data_type": BF16, "kv_data_type": FP16}, "`kv_data_type`"),
        ({"q_data_type": E4M3, "kv_data_type": E4M3}, "`o_data_type`"),  # that of the queries
    ],
)
def test_batch_attention_says_what_is_missing(options: dict[str, Any], missing: str):
    with reference_backend(), pytest.raises(ValueError, match=missing):
        wrapper = flashinfer.BatchAttention(device="cpu", backend="fa3")
        lengths = torch.tensor([TOKENS], dtype=torch.int32)
        wrapper.plan(INDPTR, INDPTR, PAGES, lengths, *HEADS, 128, 1, **options)


@pytest.mark.compiler
def test_cascades_say_what_is_missing():
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(), backend="fa3")
    tables = [[x] for x in (INDPTR, INDPTR, PAGES, LAST)]
    with reference_backend(), pytest.raises(ValueError, match="`backend`.*80/80"):
        wrapper.plan(*tables, 8, 2, 80, 1, q_data_type=BF16)
    for shared in (
        flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    ):
        assert shared(workspace(), "NHD", "fa3")._backend == "fa3"
        with pytest.raises(ValueError, match="`backend`.*'fa4'"):
            shared(workspace(), "NHD", "fa4")
