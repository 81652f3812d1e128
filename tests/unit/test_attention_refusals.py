"""Bad calls of attention are refused by name, at plan() or at the call, on a machine without GPU.

With the reference backend every fault of the fuzzer is met on every path that it concerns; without
it, what plan(), constructors and the real binding check comes before the complaint that the tensors
are not on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import executor
from flashinfer.jit.attention.modules import CtaSlots
from flashinfer.reference_backend import reference_backend
from tests.attention.batches import BF16, E4M3, Batch, indptr
from tests.attention.calls import FUNCTIONS, WRAPPERS, Call, keys, make_call, refusal_of
from tests.attention.faults import FAULTS
from tests.unit.bindings_alone import leave_out_kernels

pytestmark = pytest.mark.compiler  # the planner is compiled, by the host's compiler
CPU = torch.device("cpu")
PATHS = (*WRAPPERS, *FUNCTIONS)
SHAPES = {
    "decode": ((1, 1, 1), (40, 3, 17)),
    "paged": ((5, 3, 20), (40, 3, 17)),
    "ragged": ((5, 3, 20), (40, 3, 17)),
    "single_decode": ((1,), (40,)),
    "single_prefill": ((5,), (40,)),
}


def usual(path: str) -> Call:
    """A call that is right."""
    return make_call(path, Batch(*SHAPES[path], head_dim_qk=64, head_dim_vo=64), CPU)


APPLICABLE = [
    (path, fault)
    for path in PATHS
    for fault in FAULTS
    if FAULTS[fault].change(usual(path)) is not None
]


def _changed(path: str, fault: str) -> Call:
    call = FAULTS[fault].change(usual(path))
    assert call is not None
    return call


@pytest.mark.parametrize("path", PATHS)
def test_the_usual_call_is_accepted_by_the_reference(path):
    with reference_backend():
        usual(path).check()


@pytest.mark.parametrize("path", PATHS)
def test_the_usual_call_needs_a_gpu(path):
    with pytest.raises(ValueError, match="(?i)cuda"):
        usual(path).make_it()


@pytest.mark.parametrize(("path", "fault"), APPLICABLE)
def test_fault_is_refused_with_the_reference_backend(path, fault):
    with reference_backend():
        refusal_of(_changed(path, fault), FAULTS[fault].names)


def _is_of_plan(path: str, fault: str) -> bool:
    """Whether the fault shows before run(): what run() checks, it checks where there is a GPU."""
    before, after = usual(path), _changed(path, fault)
    if path in FUNCTIONS:
        return False
    return before.run.keys() == after.run.keys() and all(
        _same(before.run[name], after.run[name]) for name in before.run
    )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (first.dtype, first.shape, first.stride()) == (
            *(second.dtype, second.shape, second.stride()),
        )
    if isinstance(first, tuple) and isinstance(second, tuple):
        return all(map(_same, first, second))
    return first == second


# A table that does not fit the page numbers is found when the kernel gets them.
OF_PLAN = [
    (path, fault)
    for path, fault in APPLICABLE
    if _is_of_plan(path, fault) and fault != "indptr beyond the page numbers"
]


@pytest.mark.parametrize(("path", "fault"), OF_PLAN)
def test_fault_is_refused_before_the_missing_gpu(path, fault):
    message = refusal_of(_changed(path, fault), FAULTS[fault].names)
    assert "cuda" not in message.lower()


OF_RUN = [(path, fault) for path, fault in APPLICABLE if path in WRAPPERS]
OF_RUN = [(path, fault) for path, fault in OF_RUN if not _is_of_plan(path, fault)]


@pytest.fixture(scope="module")
def bound(full: bool) -> Iterator[Callable[..., Any]]:
    """Wrappers as on a GPU: with a module, its checks, and a work list that nobody will read."""
    wrappers: dict[str, Any] = {}

    def planned(call: Call) -> Any:
        wrapper = getattr(flashinfer, WRAPPERS[call.path])(**call.make)
        wrapper._executor.device = torch.device("cuda")
        with mock.patch.object(executor, "slots_of_stream", lambda *_: CtaSlots(264, 1)):
            wrapper.plan(**call.plan)
        return wrapper

    def wrapper_of(path: str, call: Call | None = None) -> Any:
        if call is not None:
            return planned(call)
        if path not in wrappers:
            wrappers[path] = planned(usual(path))
        return wrappers[path]

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
            if not full:
                leave_out_kernels(patch)
        yield wrapper_of


@pytest.mark.parametrize("path", WRAPPERS)
def test_the_binding_lacks_only_the_gpu(path, bound):
    with pytest.raises(ValueError, match="(?i)cuda"):
        bound(path).run(**usual(path).run)


def _message_of(wrapper: Any, call: Call) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        wrapper.run(**call.run)
    return str(caught.value)


@pytest.mark.parametrize(("path", "fault"), OF_RUN)
def test_fault_is_refused_by_the_binding(path, fault, bound):
    message = _message_of(bound(path), _changed(path, fault))
    assert any(name in message for name in FAULTS[fault].names), message
    assert "cuda" not in message.lower()


@pytest.mark.parametrize("path", ["decode", "paged"])
@pytest.mark.parametrize("form", ["tuple", "fused"])
@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_caches_without_a_dimension_for_pages_of_one_token(path, form, page_size, kv_layout, bound):
    batch = Batch(*SHAPES[path], head_dim_qk=64, head_dim_vo=64, form=form, kv_layout=kv_layout)
    call = make_call(path, dataclasses.replace(batch, page_size=page_size), CPU)
    axis = {"NHD": -3, "HND": -2}[kv_layout]
    cache = call.run["paged_kv_cache"]
    by_token = cache.select(axis, 0) if form == "fused" else tuple(p.select(axis, 0) for p in cache)
    message = _message_of(bound(path, call), call.with_run(paged_kv_cache=by_token))
    assert "CUDA" in message if page_size == 1 else "dimensions" in message


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same 8 bytes further: rows must begin at multiples of 16."""
    moved = tensor.new_zeros(tensor.numel() + 16)[4:]
    return moved[: tensor.numel()].view(tensor.shape)


@pytest.mark.parametrize("path", WRAPPERS)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_rows_at_other_addresses(path, name, bound):
    call = usual(path).with_run(out=torch.empty_like(usual(path).run["q"]))
    if name in ("q", "out"):
        call = call.with_run(**{name: _misaligned(call.run[name])})
    else:
        call = keys(_misaligned, "kv".index(name))(call)
    message = _message_of(bound(path), call)
    assert "16" in message and "cuda" not in message.lower()


@pytest.mark.parametrize("path", WRAPPERS)
def test_outputs_over_inputs_and_over_themselves(path, bound):
    q = usual(path).run["q"]
    twice = torch.zeros_like(q[:1]).expand_as(q)
    lse = q.view(-1).view(torch.float32)[: q.shape[0] * q.shape[1]].view(q.shape[:2])
    for changes, name in (({"out": q}, "out"), ({"out": twice}, "out"), ({"lse": lse}, "lse")):
        message = _message_of(bound(path), usual(path).with_run(q=q, **changes))
        assert name in message and "cuda" not in message.lower()


def test_there_are_enough_of_them():
    assert len(APPLICABLE) >= 150 and len(OF_PLAN) >= 60 and len(OF_RUN) >= 40
    assert {fault for _, fault in APPLICABLE} == set(FAULTS), "a fault that never applies"


# ---- constructors --------------------------------------------------------------------------------


CONSTRUCTORS: list[tuple[dict[str, Any], str]] = [
    ({"kv_layout": "DNH"}, "kv_layout"),
    ({"kv_layout": 1}, "kv_layout"),
    ({"kv_layout": None}, "kv_layout"),
    ({"backend": "cudnn"}, "backend"),
    ({"backend": "trtllm-gen"}, "backend"),
    ({"backend": "fa7"}, "backend"),
    ({"backend": 2}, "backend"),
    ({"use_cuda_graph": 1}, "use_cuda_graph"),
    ({"use_cuda_graph": True}, "_buf"),
    ({"float_workspace_buffer": None}, "float_workspace_buffer"),
    ({"float_workspace_buffer": 1 << 20}, "float_workspace_buffer"),
    ({"float_workspace_buffer": torch.zeros(64, 2)[:, 0]}, "float_workspace_buffer"),
    ({"jit_args": 3}, "jit_args"),
    ({"jit_args": ["uri", BF16]}, "jit_args"),
]


@pytest.mark.parametrize("path", WRAPPERS)
@pytest.mark.parametrize(("changes", "name"), CONSTRUCTORS)
def test_constructor(path, changes, name):
    call = usual(path).with_make(**changes)
    with pytest.raises((TypeError, ValueError), match=name):
        getattr(flashinfer, WRAPPERS[path])(**call.make)


@pytest.mark.parametrize("path", ["paged", "ragged"])
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"jit_kwargs": {"use_sliding_window": True}}, "jit_kwargs"),
        ({"jit_kwargs": {"use_window": True}}, "jit_kwargs"),
        ({"variant_owns_mask": True}, "variant_owns_mask"),
        ({"variant_owns_mask": "yes"}, "variant_owns_mask"),
    ],
)
def test_constructor_of_prefill(path, changes, name):
    call = usual(path).with_make(**changes)
    with pytest.raises((TypeError, ValueError), match=name):
        getattr(flashinfer, WRAPPERS[path])(**call.make)


def _buffers(**changes: Any) -> dict[str, Any]:
    buffers = {
        "paged_kv_indptr_buffer": torch.zeros(5, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(40, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.zeros(4, dtype=torch.int32),
    }
    return {**buffers, "use_cuda_graph": True, **changes}


@pytest.mark.parametrize("name", [n for n in _buffers() if n.endswith("buffer")])
@pytest.mark.parametrize(
    "value",
    [
        None,
        [0, 1],
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(5),
        torch.zeros(5, 5, dtype=torch.int32),
        torch.zeros(10, dtype=torch.int32)[::2],
    ],
)
def test_buffers_of_cuda_graphs(name, value):
    with reference_backend():
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20), **_buffers())
        with pytest.raises((TypeError, ValueError), match=name):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                torch.zeros(1 << 20), **_buffers(**{name: value})
            )


def test_buffers_of_another_capacity():
    too_long = torch.zeros(6, dtype=torch.int32)
    with reference_backend(), pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(1 << 20), **_buffers(paged_kv_indptr_buffer=too_long)
        )


# ---- plans ---------------------------------------------------------------------------------------


def _items(**changes: Any) -> dict[str, Any]:
    items = {
        "prefix_len_ptr": torch.tensor([20, 1, 9], dtype=torch.uint32),
        "token_pos_in_items_ptr": torch.zeros(60, dtype=torch.uint16),
        "token_pos_in_items_len": 20,
        "max_item_len_ptr": torch.tensor([3, 3, 3], dtype=torch.uint16),
        "causal": True,
    }
    return {**items, **changes}


PLANS: list[tuple[str, dict[str, Any], str]] = [
    ("decode", {"q_len_per_req": 0}, "q_len_per_req"),
    ("decode", {"q_len_per_req": 1.0}, "q_len_per_req"),
    ("decode", {"block_tables": [[0, 1]]}, "block_tables"),
    ("decode", {"seq_lens": torch.tensor([40, 3], dtype=torch.int32)}, "seq_lens"),
    ("decode", {"seq_lens": torch.tensor([40, 3, 99], dtype=torch.int32)}, "seq_lens"),
    ("decode", {"seq_lens": torch.tensor([40, 3, -1], dtype=torch.int32)}, "seq_lens"),
    ("decode", {"seq_lens": torch.tensor([40.0, 3, 17])}, "seq_lens"),
    ("decode", {"data_type": torch.int8}, "data_type"),
    ("decode", {"o_data_type": torch.float32}, "o_data_type"),
    ("decode", {"fixed_split_size": -64}, "fixed_split_size"),
    ("decode", {"fixed_split_size": 64.0}, "fixed_split_size"),
    ("decode", {"non_blocking": "yes"}, "non_blocking"),
    ("decode", {"causal": True}, "causal"),
    ("paged", {"causal": 1}, "causal"),
    ("paged", {"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction"),
    ("paged", {"kv_data_type": torch.float16}, "kv_data_type"),
    ("paged", {"o_data_type": E4M3}, "o_data_type"),
    ("paged", {"qo_indptr": indptr((5, 3))}, "qo_indptr"),
    ("paged", {"qo_indptr": indptr((5, 3, 20)) + 1}, "qo_indptr"),
    ("paged", {"qo_indptr": torch.tensor([0, 8, 5, 28], dtype=torch.int32)}, "qo_indptr"),
    ("paged", {"qo_indptr": None}, "qo_indptr"),
    ("paged", {"block_tables": torch.zeros(3, 4)}, "block_tables"),
    ("paged", {"seq_lens_q": torch.tensor([5, 3, 21], dtype=torch.int32)}, "seq_lens_q"),
    ("paged", {"max_token_per_sequence": 19}, "max_token_per_sequence"),
    ("paged", {"max_sequence_kv": 39}, "max_sequence_kv"),
    ("paged", {"uniform_q_len": 5}, "uniform_q_len"),
    ("paged", {"head_dim_vo": 24}, "head_dim_vo"),
    ("paged", {"packed_custom_mask": torch.zeros(3, dtype=torch.uint8)}, "custom_mask"),
    ("paged", {"packed_custom_mask": torch.zeros(99, dtype=torch.int32)}, "custom_mask"),
    ("paged", {"custom_mask": [True]}, "custom_mask"),
    ("paged", _items(custom_mask=torch.ones(549, dtype=torch.bool)), "custom_mask|prefix_len"),
    ("paged", _items(prefix_len_ptr=None), "prefix_len_ptr"),
    ("paged", _items(token_pos_in_items_ptr=None), "token_pos_in_items_ptr"),
    ("paged", _items(token_pos_in_items_len=0), "token_pos_in_items"),
    ("paged", _items(token_pos_in_items_len=21), "token_pos_in_items"),
    ("paged", _items(prefix_len_ptr=torch.tensor([1.0, 2, 3])), "prefix_len_ptr"),
    ("paged", _items(prefix_len_ptr=torch.tensor([1], dtype=torch.uint32)), "prefix_len_ptr"),
    ("paged", {"token_pos_in_items_len": 4}, "token_pos_in_items_len"),
    ("ragged", {"kv_indptr": indptr((40, 3))}, "kv_indptr|qo_indptr"),
    ("ragged", {"kv_indptr": indptr((40, 3, 17)) - 1}, "kv_indptr"),
    ("ragged", {"v_indptr": indptr((40, 3, 18))}, "v_indptr"),
    ("ragged", {"o_indptr": indptr((5, 3, 21))}, "o_indptr"),
    ("ragged", {"causal": "yes"}, "causal"),
    ("ragged", {"head_dim_qk": 528, "head_dim_vo": 64}, "head_dim_qk"),
    ("ragged", {"head_dim_qk": 64, "head_dim_vo": 272}, "head_dim_vo"),
]


@pytest.mark.parametrize(("path", "changes", "name"), PLANS)
def test_plan(path, changes, name):
    call = usual(path)
    wrapper = getattr(flashinfer, WRAPPERS[path])(**call.make)
    with reference_backend(), pytest.raises((TypeError, ValueError), match=name):
        wrapper.plan(**{**call.plan, **changes})


@pytest.mark.parametrize("path", WRAPPERS)
def test_run_before_plan(path):
    call = usual(path)
    with reference_backend():
        wrapper = getattr(flashinfer, WRAPPERS[path])(**call.make)
        with pytest.raises(ValueError, match="plan"):
            wrapper.run(**call.run)
        wrapper.plan(**call.plan)
        wrapper.run(**call.run)
        wrapper.reset_workspace_buffer(torch.zeros(1 << 20), torch.zeros(1 << 20))
        with pytest.raises(ValueError, match="plan"):
            wrapper.run(**call.run)


@pytest.mark.parametrize("path", WRAPPERS)
def test_a_refused_plan_leaves_nothing_to_run(path):
    """What was planned before is not mistaken for what was wanted."""
    call = usual(path)
    with reference_backend():
        wrapper = getattr(flashinfer, WRAPPERS[path])(**call.make)
        wrapper.plan(**call.plan)
        with pytest.raises(ValueError, match="window_left"):
            wrapper.plan(**{**call.plan, "window_left": -7})
        expected = usual(path).make_it()
        try:
            result = wrapper.run(**call.run)
        except ValueError as error:
            assert "plan" in str(error)
        else:
            assert torch.equal(result, expected), "neither the old plan nor none"


@pytest.mark.parametrize("path", ["decode", "paged"])
def test_workspaces_that_are_too_small_say_how_small(path):
    """Needed and given bytes, before anything is copied."""
    call = usual(path)
    with reference_backend():
        wrapper = getattr(flashinfer, WRAPPERS[path])(**call.make)
        wrapper.reset_workspace_buffer(
            torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
        )
        with pytest.raises(ValueError, match=r"int_workspace.*\d+.*32|32.*\d+"):
            wrapper.plan(**call.plan)
