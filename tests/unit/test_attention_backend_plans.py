"""Plans take the attention kernel that is forced or that the batch decides."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import mixed
from flashinfer._attention.plan.choice import KernelChoice
from flashinfer._attention.plan.executor import AttentionExecutor
from flashinfer._attention.plan.launch import GraphCapacity, PlanOptions
from flashinfer._attention.plan.planner import ANY_ROWS
from flashinfer._attention.plan.requests import (
    AttentionProblem,
)
from flashinfer.jit.attention import (
    AttentionConfig,
)
from flashinfer.reference_backend import reference_backend
from tests.attention_plans import layout_of
from tests.unit.test_attention_backends import BF16, int32
from tests.unit.test_attention_backends import on_hopper as on_hopper
from tests.unit.test_attention_backends import target as target

HEADS = (8, 2, 128)


def workspace() -> torch.Tensor:
    return torch.empty(1 << 25, dtype=torch.uint8)


def planned(
    backend: str, tokens: int = 256, ragged: bool = False, page_size: int = 1, **options: Any
) -> Any:
    """A wrapper after the plan of two requests; there is no launch."""
    indptr = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
    with reference_backend():
        if ragged:
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)
            wrapper.plan(indptr, indptr, *HEADS, q_data_type=BF16, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
            pages = torch.arange(2 * tokens, dtype=torch.int32)
            last = torch.full((2,), page_size, dtype=torch.int32)
            sizes = (*HEADS, page_size)
            wrapper.plan(indptr, indptr, pages, last, *sizes, q_data_type=BF16, **options)
    return wrapper


def configured(executor: AttentionExecutor, **options: Any) -> AttentionConfig:
    """Configuration of the module that a plan for the same problem takes."""
    assert executor.problem is not None
    return executor._module_key(executor.problem, None, PlanOptions(**options)).config()


@pytest.mark.compiler
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_plans_take_what_is_forced(backend: str, ragged: bool):
    executor = planned(backend, tokens=1, ragged=ragged)._executor
    config = configured(executor)
    assert config.backend == backend and config.tile_q == (128 if backend == "fa3" else 8)


@pytest.mark.compiler
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.usefixtures("on_hopper")
def test_auto_follows_the_batch(ragged: bool):
    boxes = {"ragged": ragged, "page_size": 16}
    assert configured(planned("auto", **boxes)._executor).backend == "fa3"
    assert configured(planned("auto", 1, **boxes)._executor).backend == "fa2"
    rotated = planned("auto", **boxes, pos_encoding_mode="ROPE_LLAMA")
    assert configured(rotated._executor).backend == "fa2"


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("qo", [[0, 5], [], [0, 9, 5], [0, -4, 8]], ids=str)
def test_what_is_no_batch_is_refused_by_name(qo: list[int]):
    """Auto looks at the lengths before the planner does."""
    kv_indptr = torch.tensor([0, 4000, 8000], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with reference_backend(), pytest.raises(ValueError, match="indptr"):
        wrapper.plan(torch.tensor(qo, dtype=torch.int32), kv_indptr, *HEADS, q_data_type=BF16)


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
def test_a_graph_keeps_its_kernel():
    """The launch that was captured is that of the first plan, whatever comes later."""
    executor = planned("auto")._executor
    spec, requests, tensors = executor.problem
    executor._graph_choice = (spec.kernel_options, False, KernelChoice("fa3", 128))
    requests = requests._replace(qo_indptr=int32(0, 1, 2))
    executor.problem = AttentionProblem(spec, requests, tensors)
    assert configured(executor).backend == "fa2"
    assert configured(executor, capacity=GraphCapacity(2, 512)).backend == "fa3"


@pytest.mark.compiler
@pytest.mark.parametrize(("backend", "merges"), [("fa2", 2 * 16), ("fa3", 0)])
def test_plans_are_cut_by_the_kernels_own_tiles(backend: str, merges: int):
    """256 tokens in parts of 129: in KV tiles of 64 tokens these are 192, in those of 128, 256."""
    executor = planned(backend, fixed_split_size=129)._executor
    assert layout_of(executor._planner)["num_merges"] == merges


@pytest.mark.compiler
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"head_dim_vo": 64}, "head_dim_vo"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "ROPE_LLAMA"),
    ],
)
def test_a_forced_plan_says_what_is_missing(ragged: bool, options: dict[str, Any], missing: str):
    planned("fa2", ragged=ragged, **options)
    with pytest.raises(ValueError, match=f"`backend`.*{missing}"):
        planned("fa3", ragged=ragged, **options)


@pytest.mark.compiler
def test_sparse_plans_take_it():
    indptr, indices = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1]).int()
    for head_dim in (128, 80):
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(), backend="fa3")
        arguments = (indptr, indices, 256, 256, 128, 128, 8, 2, head_dim)
        with reference_backend():
            if head_dim == 80:
                with pytest.raises(ValueError, match="`backend`.*80/80"):
                    wrapper.plan(*arguments, q_data_type=BF16)
                continue
            wrapper.plan(*arguments, q_data_type=BF16)
        assert configured(wrapper._executor).backend == "fa3"


def test_decode_takes_it_where_it_is_asked_for():
    for backend, expected in (("auto", "fa2"), ("fa3", "fa3")):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=backend)
        indptr = torch.tensor([0, 3], dtype=torch.int32)
        pages, last = torch.arange(3, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
        with reference_backend():
            wrapper.plan(indptr, pages, last, 8, 2, 128, 16, q_data_type=BF16)
        assert configured(wrapper._executor).backend == expected


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("tokens", "second", "expected"),
    [([900, 40], 0, "fa3"), ([900, 1], 0, "fa3"), ([5, *[1] * 9], 16, "fa2"), ([1], 0, "fa2")],
)
def test_batches_of_prefill_and_decode(tokens: list[int], second: int, expected: str):
    """The portable kernel has tiles of two shapes for them, the other one for all."""
    indptr = torch.tensor([0, *tokens]).cumsum(0).int()
    with reference_backend():
        wrapper = flashinfer.BatchAttention(device="cpu")
        pages = torch.arange(sum(tokens)).int()
        wrapper.plan(indptr, indptr, pages, torch.tensor(tokens).int(), *HEADS, 128, 16)
    config = wrapper._executor.config
    assert (config.backend, config.tile_q_second) == (expected, second)


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
def test_requests_that_decode_for_long_have_a_launch_of_their_own():
    """Two plans, which take every request once; the next batch may need one again."""
    wrapper = flashinfer.BatchAttention(device="cpu")
    executor = wrapper._executor
    for tokens, keys, is_apart in (
        ([1] * 100 + [1000] * 2, [2000] * 100 + [3000] * 2, True),
        ([1] * 4 + [2048], [100] * 4 + [2048], False),
        ([1] * 100 + [0, 1000], [4000] * 102, True),
        ([1] * 100, [2000] * 100, False),
    ):
        pages = [-(-n // 16) for n in keys]
        faster = mock.patch.object(mixed, "_is_faster_apart", return_value=is_apart)
        with reference_backend(), faster:
            wrapper.plan(
                *(torch.tensor([0, *n]).cumsum(0).int() for n in (tokens, pages)),
                *(torch.zeros(sum(pages)).int(), int32(*keys), 32, 8, 128, 128, 16, True),
            )
        assert executor._is_apart == is_apart
        if not is_apart:
            continue
        few, rest = executor._decoder, executor
        assert (few.config.backend, few.config.tile_q) == ("fa2", 8)
        assert (rest.config.backend, rest.config.tile_q_second) == ("fa3", 0)
        first, second = (launch._planner.config[-2:] for launch in (few, rest))
        assert (first, second) == ((0, 4), (5, ANY_ROWS))
        for launch in (few, rest):
            assert layout_of(launch._planner)["groups"][0]["qo_tokens"] == sum(tokens)


@pytest.mark.compiler
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.usefixtures("on_hopper")
def test_what_is_forced_is_one_launch(backend: str):
    wrapper = flashinfer.BatchAttention(device="cpu", backend=backend)
    indptr = int32(*range(0, 101), 1100)
    pages = int32(*range(0, 102 * 200, 200))
    with reference_backend():
        wrapper.plan(
            *(indptr, pages, torch.zeros(101 * 200).int(), int32(*[3200] * 101)),
            *(32, 8, 128, 128, 16, True),
        )
    assert not wrapper._executor._is_apart and wrapper._executor.config.backend == backend
