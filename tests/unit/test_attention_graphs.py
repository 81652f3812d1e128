"""Wrappers made for CUDA graphs, and the deprecated forward(), without a GPU: plans are made in
memory of the CPU and launches recorded in place of run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import executor
from flashinfer.jit.attention import AttentionModule
from flashinfer.jit.attention.modules import CtaSlots
from tests.attention_plans import layout_of
from tests.unit.bindings_alone import leave_out_kernels

pytestmark = pytest.mark.compiler

BF16 = torch.bfloat16
CAPACITY, PAGES = 4, 64
HEADS = (8, 2, 128, 16)  # query heads, key heads, head size, page size
CACHE = torch.zeros(PAGES, 2, 16, 2, 128, dtype=BF16)


class Launches(list):
    """Arguments of the launches, and whether a graph is being captured."""

    capturing = False


@pytest.fixture
def launches(monkeypatch, full) -> Iterator[Launches]:
    if not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        if not full:
            leave_out_kernels(monkeypatch)
    recorded = Launches()

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.run = lambda *arguments: recorded.append((self.config, arguments))
        self.second = lambda *arguments: None

    original = AttentionModule.__init__
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded.capturing)
    monkeypatch.setattr(executor, "slots_of_stream", lambda *_: CtaSlots(264, 1))
    with mock.patch("flashinfer._attention.plan.launch.get_attention_module", _fresh_module):
        with mock.patch.object(AttentionModule, "__init__", init):
            yield recorded


def _fresh_module(config: Any, variant: Any = None) -> AttentionModule:
    from flashinfer.jit.attention import gen_attention_module

    return gen_attention_module(config, variant).build_and_load()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def workspace() -> torch.Tensor:
    return torch.empty(32 << 20, dtype=torch.uint8)


def pretend_gpu(wrapper: Any) -> Any:
    wrapper._executor.device = torch.device("cuda")
    return wrapper


def graph_decode() -> Any:
    buffers = (zeros(CAPACITY + 1), zeros(PAGES), zeros(CAPACITY))
    return pretend_gpu(
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    )


def plan_decode(wrapper: Any, batch_size: int = 3, pages: int = 4, **options: Any) -> None:
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * pages
    indices = torch.arange(batch_size * pages, dtype=torch.int32)
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim", "page_size"), HEADS, strict=True))
    options = {"q_data_type": BF16, **sizes, **options}
    wrapper.plan(indptr, indices, torch.full((batch_size,), 5), **options)


def query(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, 8, 128, dtype=BF16)


def test_later_plans_of_a_graph_are_for_the_multiprocessors_of_the_first(launches, monkeypatch):
    """A captured launch has the CTAs of its plan; on a stream with fewer of them it keeps all."""
    wrapper = graph_decode()
    plan_decode(wrapper)
    first = wrapper._executor._planner.config_source
    monkeypatch.setattr(executor, "slots_of_stream", lambda *_: CtaSlots(96, 1))
    plan_decode(wrapper, batch_size=2)
    assert wrapper._executor._planner.config_source == first
    other = graph_decode()
    plan_decode(other)
    assert CtaSlots(96, 1) in other._executor._planner.config_source


def test_plans_of_a_graph_differ_in_their_work_lists_only(launches):
    wrapper = graph_decode()
    plan_decode(wrapper)
    first = layout_of(wrapper._executor._planner)
    for batch_size, pages in ((1, 1), (CAPACITY, 16), (2, 0)):
        plan_decode(wrapper, batch_size, pages)
        layout = layout_of(wrapper._executor._planner)
        fixed = ("num_ctas", "num_merges")
        assert [layout[name] for name in fixed] == [first[name] for name in fixed]
        assert layout["num_ctas"] > 0
        assert wrapper._paged_kv_indptr_buf[: batch_size + 1].tolist() == [
            i * pages for i in range(batch_size + 1)
        ]
        assert wrapper._paged_kv_indices_buf[: batch_size * pages].tolist() == [
            *range(batch_size * pages)
        ]
        wrapper.run(query(CAPACITY), CACHE)
    assert len(launches) == 3


@pytest.mark.parametrize("non_blocking", [True, False])
def test_blocking_plans_wait_for_the_buffers(launches, monkeypatch, non_blocking):
    """What the caller's pinned tensors hold may change once a plan that blocks has returned."""
    wrapper, copies = graph_decode(), []
    copy = torch.Tensor.copy_

    def record(self, source, non_blocking=False):
        copies.append((self.data_ptr(), non_blocking))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", record)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: stream)
    plan_decode(wrapper, non_blocking=non_blocking)
    buffers = {
        wrapper._paged_kv_indptr_buf.data_ptr(),
        wrapper._paged_kv_indices_buf.data_ptr(),
        wrapper._paged_kv_last_page_len_buf.data_ptr(),
    }
    assert {to for to, _ in copies} >= buffers
    assert all(flag == non_blocking for to, flag in copies if to in buffers)


@pytest.mark.parametrize(
    "batch_size, pages, named", [(CAPACITY + 1, 4, "batch"), (CAPACITY, PAGES, "indices")]
)
def test_growing_past_the_capacity_is_refused(launches, batch_size, pages, named):
    wrapper = graph_decode()
    plan_decode(wrapper)
    kept = wrapper._paged_kv_indices_buf.clone(), wrapper._paged_kv_indptr_buf.clone()
    with pytest.raises(ValueError, match=named):
        plan_decode(wrapper, batch_size, pages)
    # The buffers, which a captured graph reads, are still those of the last plan that succeeded.
    assert torch.equal(wrapper._paged_kv_indices_buf, kept[0])
    assert torch.equal(wrapper._paged_kv_indptr_buf, kept[1])
    with pytest.raises(ValueError, match=r"plan\(\) must be called"):
        wrapper.run(query(CAPACITY), CACHE)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"sm_scale": 0.5}, "sm_scale"),
        ({"window_left": 3}, "window_left"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap"),
        ({"q_data_type": torch.float16}, "q_data_type"),
        ({"disable_split_kv": True}, "disable_split_kv"),
        ({"fixed_split_size": 64}, "fixed_split_size"),
        ({"q_len_per_req": 2}, "tokens_per_request"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode"),
    ],
)
def test_what_a_captured_graph_holds_cannot_be_planned_anew(launches, options, named):
    wrapper = graph_decode()
    plan_decode(wrapper)
    plan_decode(wrapper, **options)  # not captured yet
    plan_decode(wrapper)
    launches.capturing = True
    wrapper.run(query(CAPACITY), CACHE)
    launches.capturing = False
    plan_decode(wrapper, batch_size=2)
    with pytest.raises(ValueError, match=f"`{named}` must stay"):
        plan_decode(wrapper, **options)
    wrapper.reset_workspace_buffer(workspace(), workspace())
    pretend_gpu(wrapper)
    with pytest.raises(ValueError, match="`float_workspace_buffer` must stay"):
        plan_decode(wrapper)


def graph_prefill(**buffers: Any) -> Any:
    return pretend_gpu(
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(),
            use_cuda_graph=True,
            qo_indptr_buf=zeros(CAPACITY + 1),
            paged_kv_indptr_buf=zeros(CAPACITY + 1),
            paged_kv_indices_buf=zeros(PAGES),
            paged_kv_last_page_len_buf=zeros(CAPACITY),
            **buffers,
        )
    )


def plan_prefill(wrapper: Any, *lengths: int, begin: str = "plan", **options: Any) -> None:
    indptr = torch.arange(len(lengths) + 1, dtype=torch.int32) * 4
    table = (indptr, torch.arange(4 * len(lengths)), torch.full((len(lengths),), 9))
    qo_indptr = torch.tensor([0, *lengths]).cumsum(0)
    getattr(wrapper, begin)(qo_indptr, *table, *HEADS, q_data_type=BF16, **options)


def test_a_prefill_graph_keeps_its_tile_and_its_tokens(launches):
    wrapper = graph_prefill()
    plan_prefill(wrapper, 100, 50)
    tile = layout_of(wrapper._executor._planner)["tile_q"]
    plan_prefill(wrapper, 1, 1, 1)  # alone these would have the smallest tile
    assert layout_of(wrapper._executor._planner)["tile_q"] == tile == 128
    with pytest.raises(ValueError, match="150"):
        plan_prefill(wrapper, 100, 51)
    plan_prefill(wrapper, 150)


def test_other_plans_before_a_capture_have_tiles_of_their_own(launches):
    wrapper = graph_prefill()
    plan_prefill(wrapper, 100, 50)
    plan_prefill(wrapper, 100, 50, fixed_split_size=64)
    assert layout_of(wrapper._executor._planner)["tile_q"] == 64  # of any batch with such a size
    captured(launches, lambda: wrapper.run(query(150), CACHE))
    plan_prefill(wrapper, 1, fixed_split_size=64)
    assert layout_of(wrapper._executor._planner)["tile_q"] == 64


def test_sizing_a_prefill_graph_fixes_nothing(launches):
    wrapper = graph_prefill()
    table = (int32(0, 4), int32(0, 1, 2, 3), int32(9))
    wrapper.workspace_size(int32(0, 1), *table, *HEADS, q_data_type=BF16)
    plan_prefill(wrapper, 100, 50)
    assert layout_of(wrapper._executor._planner)["tile_q"] == 128


def test_masks_of_a_prefill_graph(launches):
    with pytest.raises(ValueError, match="`custom_mask_buf`"):
        plan_prefill(graph_prefill(), 4, packed_custom_mask=torch.zeros(29, dtype=torch.uint8))
    buffers = {"custom_mask_buf": torch.zeros(64, dtype=torch.uint8), "mask_indptr_buf": zeros(5)}
    wrapper = graph_prefill(**buffers)
    with pytest.raises(ValueError, match="`custom_mask` must be given"):
        plan_prefill(wrapper, 4)
    packed = torch.arange(29, dtype=torch.uint8)  # 4 queries of 57 keys
    plan_prefill(wrapper, 4, packed_custom_mask=packed)
    assert torch.equal(buffers["custom_mask_buf"][:29], packed)
    assert buffers["mask_indptr_buf"][:2].tolist() == [0, 29]
    small = graph_prefill(**{**buffers, "custom_mask_buf": torch.zeros(28, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="cannot grow"):
        plan_prefill(small, 4, packed_custom_mask=packed)
    with pytest.raises(ValueError, match="6 query tokens"):  # nothing is copied for no plan
        plan_prefill(wrapper, 2, 4, packed_custom_mask=torch.zeros(44, dtype=torch.uint8))
    assert torch.equal(buffers["custom_mask_buf"][:29], packed)


def captured(launches: Launches, run: Any) -> None:
    launches.capturing = True
    run()
    launches.capturing = False


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("prefix_len_ptr", torch.int32),
        ("token_pos_in_items_ptr", torch.int16),
        ("max_item_len_ptr", torch.int16),
    ],
)
def test_tensors_of_items_stay_where_a_graph_reads_them(launches, name, dtype):
    wrapper = graph_prefill()
    items: dict[str, Any] = {
        "prefix_len_ptr": int32(20),
        "token_pos_in_items_ptr": torch.zeros(40, dtype=torch.int16),
        "token_pos_in_items_len": 40,
        "max_item_len_ptr": torch.tensor([9], dtype=torch.int16),
    }
    plan_prefill(wrapper, 37, **items)
    captured(launches, lambda: wrapper.run(query(37), CACHE))
    plan_prefill(wrapper, 30, **items)
    with pytest.raises(ValueError, match=f"`{name}` must stay"):
        plan_prefill(wrapper, 30, **{**items, name: items[name].clone()})


# ---- The deprecated forward() ----


def test_forward_plans_anew_only_if_other_keys_are_visible(launches):
    wrapper = pretend_gpu(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()))
    plan_prefill(wrapper, 30, 40, begin="begin_forward")
    planner = wrapper._executor._planner
    with mock.patch.object(planner, "plan", wraps=planner.plan) as plan:
        for sm_scale in (0.1, 0.1, 0.2):
            wrapper.forward(query(70), CACHE, causal=True, sm_scale=sm_scale)
        assert plan.call_count <= 2  # one plan; checked before a module is compiled, if it was
        plan.reset_mock()
        wrapper.forward(query(70), CACHE, causal=True, logits_soft_cap=5.0)
        assert plan.call_count == 0
    masks = [config.mask_mode for config, _ in launches]
    assert masks == ["causal"] * 4
    assert [config.logits_soft_cap for config, _ in launches] == [False, False, False, True]
    assert [arguments[6] for _, arguments in launches] == [0.1, 0.1, 0.2, pytest.approx(128**-0.5)]
    wrapper.end_forward()


def test_forward_with_the_slopes_that_were_planned(launches):
    wrapper = pretend_gpu(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()))
    plan_prefill(wrapper, 30, pos_encoding_mode="ALIBI")
    wrapper.forward(query(30), CACHE, pos_encoding_mode="ALIBI")
    wrapper.forward(query(30), CACHE)
    wrapper.forward(query(30), CACHE, pos_encoding_mode="ALIBI", sm_scale=0.5)
    assert [config.pos_encoding for config, _ in launches] == ["alibi", "none", "alibi"]


def test_forward_beside_a_graph_keeps_its_plan(launches):
    wrapper = graph_prefill()
    plan_prefill(wrapper, 30, 40, begin="begin_forward")
    captured(launches, lambda: wrapper.forward(query(70), CACHE))
    planner = wrapper._executor._planner
    with mock.patch.object(planner, "plan", wraps=planner.plan) as plan:
        wrapper.forward(query(70), CACHE, causal=True, window_left=5)
        assert plan.call_count == 0  # the graph would see the narrower plan
    other = graph_prefill()
    plan_prefill(other, 30, 40, causal=True, begin="begin_forward")
    captured(launches, lambda: other.forward(query(70), CACHE, causal=True))
    with pytest.raises(ValueError, match="`causal` and `window_left`"):
        other.forward(query(70), CACHE, causal=False)


def test_forward_while_a_graph_is_captured(launches):
    wrapper = graph_prefill()
    plan_prefill(wrapper, 30, 40, begin="begin_forward")
    launches.capturing = True
    wrapper.forward(query(70), CACHE, causal=True)  # visits all keys, masks in the kernel
    assert launches[-1][0].mask_mode == "causal"
    launches.capturing = False
    plan_prefill(wrapper, 20, 40, begin="begin_forward")  # as before the capture
    other = graph_prefill()
    plan_prefill(other, 30, 40, causal=True, begin="begin_forward")
    launches.capturing = True
    with pytest.raises(ValueError, match="`causal` and `window_left`"):
        other.forward(query(70), CACHE, causal=False)
    launches.capturing = False
    other.forward(query(70), CACHE, causal=False)  # plans anew: nothing is captured
    launches.capturing = True
    with pytest.raises(ValueError, match="later plans would leave them out"):
        other.forward(query(70), CACHE, causal=False)


@pytest.mark.parametrize("base, layout", [("ln", "NH"), ("log2", "HN"), ("ln", "HN")])
def test_log_sum_exps_are_converted(launches, base: str, layout: str):
    wrapper = pretend_gpu(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()))
    plan_prefill(wrapper, 3)
    wrapper._executor._run = lambda *arguments: arguments[5].copy_(
        torch.arange(24.0).reshape(3, 8)  # what the kernel writes: tokens and heads, base 2
    )
    expected = torch.arange(24.0).reshape(3, 8)
    expected = expected * torch.log(torch.tensor(2.0)) if base == "ln" else expected
    expected = expected.t() if layout == "HN" else expected
    options = {"lse_base": base, "lse_layout": layout}
    _, lse = wrapper.run(query(3), CACHE, return_lse=True, **options)
    torch.testing.assert_close(lse, expected.contiguous())
    own = torch.zeros(expected.shape)
    wrapper.run(query(3), CACHE, lse=own, **options)
    torch.testing.assert_close(own, expected.contiguous())
    with pytest.raises(ValueError, match="`lse`"):
        wrapper.run(query(3), CACHE, lse=torch.zeros(2, 8), **options)
