"""``torch.compile(fullgraph=True)`` of functions without trace templates: attention that plans and
runs in one call, what ranks call together, and what needs a Hopper or a loaded module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import comm, decode, paged_mqa, prefill
from flashinfer._compile import operators
from flashinfer._compile.effects import Effects
from flashinfer._compile.traced import graph_operator
from flashinfer.comm import AllReduceFusionPattern as Pattern
from flashinfer.comm.comm_backend import ThreadBackend
from flashinfer.jit.attention.config import AttentionConfig
from flashinfer.jit.attention.modules import AttentionModule
from flashinfer.testing.tensors import clone_arguments, iter_tensors
from tests.trace import one_call
from tests.trace.test_torch_compile import graph_of, is_float8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = list(one_call.calls("cpu"))


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    torch._dynamo.reset()
    with contextlib.nullcontext() if DEVICE == "cuda" else flashinfer.reference_backend():
        yield


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_one_call_is_one_graph(name: str):
    function, arguments = one_call.calls(DEVICE)[name]
    eager, given = clone_arguments(arguments), clone_arguments(arguments)
    expected = function(**eager)
    compiled = torch.compile(lambda **call: function(**call), fullgraph=True, backend="aot_eager")
    actual = compiled(**given)
    assert type(actual) is type(expected)
    scratch = ("workspace_buffer",)
    found = [[*iter_tensors(returned)] for returned in (actual, expected)]
    for i, call in enumerate((given, eager)):
        found[i] += iter_tensors([call[key] for key in call if key not in scratch])
    for a, b in zip(*found, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", ATTENTION)
def test_operators_of_one_call_pass_the_check_of_torch(name: str):
    function, arguments = one_call.calls(DEVICE)[name]
    checked = 0
    for operator, args in graph_of(function, arguments):
        names = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if not any(is_float8(arg) for arg in args):
            names.append("test_schema")
        torch.library.opcheck(operator, args, test_utils=names)
        checked += 1
    assert checked == 1


class Workspace(comm.AllReduceFusionWorkspace):
    """The workspace of four ranks as far as a graph sees it."""

    backend = "trtllm"

    def destroy(self) -> None:
        """Nothing is there."""

    def is_buffer_size_sufficient(self, *args: Any, **kwargs: Any) -> bool:
        return True


class Exchange(comm.ExchangeWorkspace):
    def __init__(self) -> None:
        self.rank, self.world_size = 1, 4


class Module(AttentionModule):
    """A variant's module as far as a graph sees it."""

    def __init__(self) -> None:
        half = torch.float16
        self.config = AttentionConfig(half, half, torch.bfloat16, 64, 64, 64)


def _ones(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


HALF = torch.float16
# A function, its arguments, and of each result its shape and dtype, or the argument that it is.
Unrun = tuple[Callable[..., Any], dict[str, Any], list[Any]]
# What functions of four ranks take: `X`, `OTHER` and the outputs are rows of 64 numbers.
X, OTHER = _ones(8, 64), _ones(8, 64)
OUTPUTS = {"residual_out": _ones(8, 64), "norm_out": _ones(8, 64)}
NORM = {"residual_in": OTHER, "rms_gamma": _ones(64), "rms_eps": 1e-5}


def collectives() -> dict[str, Unrun]:
    """Sums and rows of four ranks."""
    group = ThreadBackend.create(4)[1]
    fusion = {"input": X, "workspace": Workspace(4, 1), **NORM}
    return {
        "all_gather": (comm.all_gather, {"input": X, "workspace": Exchange()}, [((32, 64), HALF)]),
        "reduce_scatter": (
            comm.reduce_scatter,
            {"input": X, "workspace": Exchange(), "output": _ones(2, 64)},
            ["output"],
        ),
        "all_gather_matmul": (
            comm.all_gather_matmul,
            {"inp": X, "w": _ones(64, 16), "group": group},
            [((32, 16), HALF)],
        ),
        "quantized_all_reduce": (
            comm.quantized_all_reduce, {"inp": X, "group": group}, [((8, 64), HALF)]
        ),
        "allreduce_fusion": (
            comm.allreduce_fusion, {**fusion, "pattern": Pattern.kAllReduce}, [((8, 64), HALF)]
        ),
        "allreduce_fusion, norm": (
            comm.allreduce_fusion,
            {**fusion, **OUTPUTS, "pattern": int(Pattern.kARResidualRMSNorm)},
            ["norm_out"],
        ),
        "allreduce_fusion, codes": (
            comm.allreduce_fusion,
            {**fusion, "pattern": Pattern.kARResidualRMSNormFP8Quant, "scale_factor": 0.5},
            [((8, 64), torch.float8_e4m3fn)],
        ),
        "vllm_all_reduce": (
            comm.vllm_all_reduce,
            {
                "fa": 1, "inp": X, "out": OTHER, "reg_buffer": 0, "reg_buffer_sz_bytes": 0,
                "num_ctas": 8,
            },
            [],
        ),
    }  # fmt: skip


def sums_by_pointers() -> dict[str, Unrun]:
    """Sums of four ranks whose workspace is a list of addresses."""
    place = {"world_size": 4, "world_rank": 1, "token_num": 8, "hidden_dim": 64}
    flags = {"launch_with_pdl": False, "trigger_completion_at_end": True, "fp32_acc": False}
    coded = {"quant_out": None, "scale_out": None}
    pointers = {"workspace_ptrs": torch.zeros(8, dtype=torch.int64)}
    return {
        "trtllm_allreduce_fusion": (
            comm.trtllm_allreduce_fusion,
            {
                "allreduce_in": X, "allreduce_out": None, **place, **pointers, **flags, **NORM,
                **OUTPUTS, **coded, "pattern_code": Pattern.kARResidualRMSNorm,
                "use_oneshot": None, "scale_factor": None, "layout_code": None,
                "metadata": {"tp_size": 4, "max_token_num": 8},
            },
            [],
        ),
        "trtllm_custom_all_reduce": (
            comm.trtllm_custom_all_reduce,
            {"inp": X, "out": OTHER, "tp_size": 4, "tp_rank": 1, **pointers},
            [],
        ),
        "trtllm_moe_allreduce_fusion": (
            comm.trtllm_moe_allreduce_fusion,
            {
                **place, **pointers, "launch_with_pdl": False, **NORM, "scale_factor": 1.0,
                "moe_reduction_device_num_experts": 3, "layout_code": None,
                "moe_reduction_scale_input": _ones(3, 8, dtype=torch.float32),
                "moe_reduction_active_experts_token_input": _ones(3, 8, 64),
                "moe_reduction_token_input": X, "moe_allreduce_out": None, **OUTPUTS, **coded,
            },
            [],
        ),
        "trtllm_moe_finalize_allreduce_fusion": (
            comm.trtllm_moe_finalize_allreduce_fusion,
            {
                "allreduce_in": _ones(20, 64), "residual_in": OTHER, "norm_weight": _ones(64),
                "expanded_idx_to_permuted_idx": torch.zeros(8, 2, dtype=torch.int32), **OUTPUTS,
                **coded, **pointers, "launch_with_pdl": False, "world_rank": 1, "world_size": 4,
                "eps": 1e-5, "shared_expert_output": None, "expert_scale_factor": None,
                "routed_scaling_factor": None,
            },
            [],
        ),
    }  # fmt: skip


def exchanges() -> dict[str, Unrun]:
    """Parts of attention, tokens of experts and heads that four ranks exchange."""
    parts = {"partial_o": _ones(8, 4, 64), "workspace": torch.zeros(1, 9, dtype=torch.int64)}
    of_four = {"cp_rank": 1, "cp_size": 4}
    experts = {
        "workspace": torch.zeros(64, dtype=torch.uint8),
        "metainfo": torch.zeros(6, dtype=torch.int64),
        "ep_rank": 1,
    }
    combined = {
        "payload": _ones(4, 3, 64),
        "local_num_tokens": 2,
        "runtime_max_tokens_per_rank": 3,
        "ep_size": 4,
        "top_k": 2,
        "combine_payload_offset": 256,
        **experts,
    }
    heads = {"world_size": 2, "head_offset": 1}
    stats = _ones(8, 4, 2, dtype=torch.float32)
    return {
        "decode_cp_a2a_alltoall": (
            comm.decode_cp_a2a_alltoall,
            {**parts, **of_four, "softmax_stats": stats},
            [((8, 4, 64), HALF), ((8, 4, 2), torch.float32)],
        ),
        "decode_cp_a2a_lse_reduce": (
            comm.decode_cp_a2a_lse_reduce,
            {**parts, **of_four, "partial_lse": stats[..., 0].contiguous()},
            [((8, 64), HALF)],
        ),
        "moe_a2a_sanitize_expert_ids": (
            comm.moe_a2a_sanitize_expert_ids,
            {"expert_ids": torch.zeros(4, 3, 2, dtype=torch.int32), "invalid_expert_id": 9,
             **experts},
            [],
        ),
        "moe_a2a_combine": (
            comm.moe_a2a_combine,
            {**combined, "output_dtype": torch.float32},
            [((2, 64), torch.float32)],
        ),
        "pack_ulysses_qkv_head_chunk": (
            comm.pack_ulysses_qkv_head_chunk,
            {**dict.fromkeys(("query", "key", "value"), _ones(1, 3, 6, 8)), **heads,
             "head_count": 2},
            [((1, 3, 4, 24), HALF)],
        ),
        "merge_ulysses_output_head_chunk": (
            comm.merge_ulysses_output_head_chunk,
            {"received": _ones(1, 3, 4, 8), **heads, "local_heads": 3, "out": _ones(1, 3, 6, 8)},
            ["out"],
        ),
    }  # fmt: skip


def on_hopper() -> dict[str, Unrun]:
    """Scores that Hopper computes, and attention by a loaded module."""
    keys = {"k": _ones(9, 2, 64), "v": _ones(9, 2, 64)}
    return {
        "get_paged_mqa_logits_metadata": (
            paged_mqa.get_paged_mqa_logits_metadata,
            {"context_lens": torch.zeros(3, dtype=torch.int32), "block_kv": 64, "num_sms": 132},
            [((133, 2), torch.int32)],
        ),
        "fp8_paged_mqa_logits": (
            paged_mqa.fp8_paged_mqa_logits,
            {
                "q": _ones(3, 2, 32, 128, dtype=torch.float8_e4m3fn),
                "kv_cache": torch.zeros(8, 64, 1, 132, dtype=torch.uint8),
                "weights": _ones(6, 32, dtype=torch.float32),
                "context_lens": torch.zeros(3, dtype=torch.int32),
                "block_table": torch.zeros(3, 4, dtype=torch.int32),
                "schedule_meta": torch.zeros(133, 2, dtype=torch.int32),
                "max_context_len": 256,
            },
            [((6, 256), torch.float32)],
        ),
        "single_decode_with_kv_cache_with_jit_module": (
            decode.single_decode_with_kv_cache_with_jit_module,
            {**keys, "q": _ones(4, 64), "jit_module": Module(), "return_lse": True},
            [((4, 64), torch.bfloat16), ((4,), torch.float32)],
        ),
        "single_prefill_with_kv_cache_with_jit_module": (
            prefill.single_prefill_with_kv_cache_with_jit_module,
            {**keys, "q": _ones(7, 4, 64), "jit_module": Module(), "mask_mode": 1},
            [((7, 4, 64), torch.bfloat16)],
        ),
    }  # fmt: skip


def unrun_calls() -> dict[str, Unrun]:
    """Calls of functions of four ranks or of a Hopper."""
    return collectives() | sums_by_pointers() | exchanges() | on_hopper()


WRITTEN = {
    "output", "out_", "residual_out", "norm_out", "quant_out", "scale_out", "allreduce_out",
    "moe_allreduce_out", "expert_ids",
}  # fmt: skip


@pytest.mark.parametrize("name", unrun_calls())
def test_what_needs_ranks_or_a_hopper_is_one_graph(name: str):
    """No kernel runs: what is looked at is the graph, and what it says of its results."""
    function, arguments, results = unrun_calls()[name]
    found: list[Any] = []

    def unrun(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        (returned,) = graph.graph.output_node().args
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        made = {node.name: node.meta["example_value"] for node in returned}
        zeros = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in made.items()}
        return lambda *args: [(zeros | dict(zip(names, args, strict=True)))[n] for n in made]

    given = {key: arguments[key] for key in arguments if isinstance(arguments[key], torch.Tensor)}
    rest = {key: arguments[key] for key in arguments if key not in given}
    compiled = torch.compile(lambda **x: function(**x, **rest), fullgraph=True, backend=unrun)
    returned = compiled(**given)
    (operator,) = [each for each in found if getattr(each, "namespace", "") == "flashinfer"]
    declared = {a.name for a in operator._schema.arguments if a.alias_info is not None}
    assert declared == {"out_" if key == "out" else key for key in given} & WRITTEN
    tensors = [*iter_tensors(returned)]
    assert len(tensors) == len(results)
    for tensor, wanted in zip(tensors, results, strict=True):
        if isinstance(wanted, str):
            assert tensor is given[wanted]
        else:
            assert (tuple(tensor.shape), tensor.dtype) == wanted


def test_every_function_with_effects_has_a_call_here():
    called = [call[0] for call in (*one_call.calls("cpu").values(), *unrun_calls().values())]
    declared = [each.api for each in operators._apis if isinstance(each.trace, Effects)]
    missing = {each.__name__ for each in declared} - {each.__name__ for each in called}
    assert not missing


def test_effects_name_parameters():
    def function(a: torch.Tensor) -> None:
        """Takes one tensor."""

    with pytest.raises(TypeError, match=r"function has no parameters \['b'\]"):
        graph_operator("b")(function)
    assert graph_operator("a")(function) is function  # eager calls are what they were
