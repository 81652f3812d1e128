"""What the recurrent layers' functions refuse, on the CPU, and what slots mean that no pool has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import gdn_decode, gdn_prefill, kda_decode
from flashinfer._linear_attention import replay
from flashinfer._linear_attention.channel_gates import scale_by_channel
from flashinfer._linear_attention.pools import write_rows
from flashinfer.gdn2_prefill import chunk_gated_delta_rule2
from flashinfer.mamba import replayssm_materialize, selective_state_update
from tests.linear_attention import test_kda_fuzz as kda

BF16 = torch.bfloat16
BATCH, TOKENS, HEADS, DIM, STATE = 3, 2, 2, 8, 64

bindings = pytest.mark.usefixtures("bindings_on_the_cpu")
needs_bindings = [pytest.mark.compiler, bindings]


def mamba_call(**changes: Any) -> dict[str, Any]:
    """An ordinary call of `selective_state_update` that keeps the states of all tokens."""
    rows = (BATCH, TOKENS, HEADS)
    call = {
        "state": torch.zeros(5, HEADS, DIM, STATE),
        "x": torch.randn(*rows, DIM).to(BF16),
        "dt": torch.rand(*rows, 1).expand(*rows, DIM),
        "A": -torch.rand(HEADS, 1, 1).expand(HEADS, DIM, STATE),
        "B": torch.randn(BATCH, TOKENS, 1, STATE).to(BF16),
        "C": torch.randn(BATCH, TOKENS, 1, STATE).to(BF16),
        "D": torch.rand(HEADS, DIM),
        "intermediate_states_buffer": torch.zeros(BATCH, TOKENS, HEADS, DIM, STATE),
    }
    return call | changes


def buffer(rows: int, steps: int) -> torch.Tensor:
    return torch.zeros(rows, steps, HEADS, DIM, STATE)


INDICES = torch.arange(BATCH)
SCALES = torch.ones(BATCH, TOKENS, HEADS, DIM)
SEED = torch.zeros(1, dtype=torch.int64)
PACKED = {
    "x": torch.zeros(4, HEADS, DIM, dtype=BF16),
    "dt": torch.zeros(4, HEADS, DIM),
    "B": torch.zeros(4, 1, STATE, dtype=BF16),
    "C": torch.zeros(4, 1, STATE, dtype=BF16),
    "cu_seqlens": torch.tensor([0, 1, 2, 4]),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intermediate_states_buffer": buffer(BATCH - 1, TOKENS)},
            r"`intermediate_states_buffer` must have at least 3 rows of 2 steps, got shape \[2, 2",
        ),
        (
            {"intermediate_states_buffer": buffer(BATCH, TOKENS - 1)},
            "`intermediate_states_buffer` must have at least 3 rows of 2 steps",
        ),
        (
            {
                "intermediate_states_buffer": buffer(1, 1),
                "intermediate_state_indices": INDICES,
            },
            "`intermediate_states_buffer` must have at least 2 steps",
        ),
        (
            {"intermediate_states_buffer": buffer(BATCH, 2 * TOKENS)[:, ::2]},
            "`intermediate_states_buffer` must be contiguous",
        ),
        (
            {**PACKED, "intermediate_states_buffer": buffer(2, 4)},
            "`intermediate_states_buffer` must have at least 3 rows",
        ),
        ({**PACKED, "cache_steps": 3}, "`cache_steps` must be at most the 2 steps"),
        (
            {"intermediate_states_buffer": None, "intermediate_state_indices": INDICES},
            "`intermediate_state_indices` needs `intermediate_states_buffer`",
        ),
        (
            {"intermediate_states_buffer": None, "intermediate_state_scales": SCALES},
            "`intermediate_state_scales` needs `intermediate_states_buffer`",
        ),
        ({"cache_steps": -3}, "`cache_steps` must be from 0"),
        ({"philox_rounds": -5}, "`philox_rounds` must be from 0"),
        ({"philox_rounds": 2**32 + 1}, "`philox_rounds` must be from 0"),
        ({"rand_seed": SEED, "philox_rounds": 0}, "`philox_rounds` must be at least 1"),
        (
            {"rand_seed": SEED, "state_scale": torch.ones(5, HEADS, DIM)},
            "`rand_seed` and `state_scale` exclude each other",
        ),
        (
            {
                "state": torch.zeros(5, HEADS, DIM, STATE, dtype=torch.int8),
                "state_scale": torch.ones(5, HEADS, DIM, 2),
            },
            r"`state_scale` must have a last dimension of 1, got shape \[5, 2, 8, 2\]",
        ),
    ],
)
@bindings
def test_arguments_of_mamba(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selective_state_update(**mamba_call(**changes))


@pytest.mark.compiler
@bindings
def test_result_of_mamba_across_its_input() -> None:
    rows = torch.zeros(BATCH * TOKENS * HEADS * DIM + DIM, dtype=BF16)
    shape = (BATCH, TOKENS, HEADS, DIM)
    x, shifted = rows[:-DIM].view(shape), rows[DIM:].view(shape)
    for changes in ({"x": x}, {"z": x}):
        (name,) = changes
        with pytest.raises(ValueError, match=f"`out` must not share memory with `{name}`"):
            selective_state_update(**mamba_call(**changes, out=shifted))
        with pytest.raises(ValueError, match="CUDA tensor"):
            selective_state_update(**mamba_call(**changes, out=x))


@pytest.mark.compiler
@bindings
def test_scales_of_a_state_may_have_a_dimension_more() -> None:
    changes = {"state": torch.zeros(5, HEADS, DIM, STATE, dtype=torch.int8)}
    changes |= {"state_scale": torch.ones(5, HEADS, DIM, 1), "intermediate_states_buffer": None}
    with pytest.raises(ValueError, match="CUDA tensor"):
        selective_state_update(**mamba_call(**changes))


MANY = 70000


@pytest.mark.compiler
@bindings
def test_more_sequences_than_a_grid_has() -> None:
    one = mamba_call(intermediate_states_buffer=None)
    rows = {name: one[name][:1].expand(MANY, *one[name].shape[1:]) for name in ("x", "B", "C")}
    call = one | rows | {"dt": one["dt"][:1].expand(MANY, TOKENS, HEADS, DIM)}
    call["state_batch_indices"] = torch.zeros(MANY, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`x` must have at most 65535 sequences, got shape"):
        selective_state_update(**call)
    q = torch.zeros(MANY, 1, 1, 32, dtype=BF16)
    with pytest.raises(ValueError, match=r"`q` must have at most 65535 sequences, got shape"):
        kda_decode.recurrent_kda(q, q, q, q, q[..., 0])
    starts = torch.zeros(MANY + 1, dtype=torch.int32)
    few = q[:1]
    with pytest.raises(ValueError, match=r"`cu_seqlens` must have at most 65535 sequences"):
        kda_decode.recurrent_kda(few, few, few, few, few[..., 0], cu_seqlens=starts)


@pytest.mark.parametrize(("layers", "batch"), [(48, MANY), (2048, 1)])
@pytest.mark.compiler
@bindings
def test_more_layers_than_a_grid_has(layers: int, batch: int) -> None:
    table, slots = torch.zeros(layers, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    slots, counts = slots.expand(layers, batch), slots.expand(batch)
    sizes = {"dim": 64, "dstate": 64, "num_heads": 32, "heads_per_group": 32}
    kinds = {"state_dtype": BF16, "input_dtype": BF16, "matrixA_dtype": torch.float32}
    with pytest.raises(ValueError, match=r"`src_slots` must have at most 65535 (layers|requests)"):
        replayssm_materialize(
            *[table] * 11, slots, slots, counts, counts, counts,
            **kinds, **sizes, max_window=4, ring_buffer_len=8,
        )  # fmt: skip


def test_layers_are_committed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    monkeypatch.setattr(replay, "_MOST_SEQUENCES", 6)
    monkeypatch.setattr(replay, "run_delta_rule", lambda out, *_, **__: calls.append(out.shape))
    layers, slots, batch, tokens = 5, 4, 3, 2
    windows = replay.Windows(
        torch.zeros(layers, slots, 1, tokens, 32), torch.zeros(layers, slots, 1, tokens, 32),
        torch.zeros(layers, slots, 1, tokens), torch.zeros(layers, slots, 1, tokens),
    )  # fmt: skip
    own = torch.arange(batch)
    pool = torch.zeros(layers, slots, 1, 32, 32)
    replay.commit_accepted(pool, windows, own, own, own, True)
    assert [shape[0] for shape in calls] == [6, 6, 3]


# ---- flags ---------------------------------------------------------------------------------------


def _gdn2() -> dict[str, Any]:
    q = torch.zeros(4, 1, 64, dtype=BF16)
    return {"q": q, "k": q, "v": q, "cu_seqlens": torch.tensor([0, 4])}


DECODE = ("gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp")
FLAGS: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = [
    (selective_state_update, mamba_call, ("dt_softplus", "disable_state_update")),
    (chunk_gated_delta_rule2, _gdn2, ("output_final_state", "use_qk_l2norm_in_kernel")),
    (
        gdn_prefill.chunk_gated_delta_rule, _gdn2,
        ("output_final_state", "use_qk_l2norm_in_kernel"),
    ),
    (
        kda_decode.recurrent_kda,
        partial(kda.usual, "recurrent_kda", torch.device("cpu")),
        (
            "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "beta_is_logit",
            "disable_state_update",
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("api", "call", "name"), [(api, call, name) for api, call, names in FLAGS for name in names]
)
@pytest.mark.parametrize("value", [2, "no", None])
@bindings
def test_flags(api: Callable[..., Any], call: Callable[[], Any], name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be a bool, got {value!r}"):
        api(**call() | {name: value})


@pytest.mark.parametrize("value", [2, "no"])
@bindings
def test_flags_of_decode(value: Any) -> None:
    state, q = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 1, 64, dtype=BF16)
    a, log = torch.zeros(1, 1, 1), torch.zeros(1)
    gates = {"A_log": log, "a": a, "dt_bias": log, "b": a}
    for function, name in [
        ("gated_delta_rule_decode", "use_qk_l2norm"),
        ("gated_delta_rule_decode_pretranspose", "use_qk_l2norm"),
        ("gated_delta_rule_decode_pretranspose", "disable_state_update"),
        ("gated_delta_rule_mtp", "use_qk_l2norm"),
        ("gated_delta_rule_mtp", "disable_state_update"),
    ]:
        rest = {"initial_state": state, "initial_state_indices": torch.zeros(1).int()}
        rest = rest if function.endswith("mtp") else {"state": state}
        with pytest.raises(TypeError, match=f"`{name}` must be a bool"):
            getattr(gdn_decode, function)(q, q, q, **rest, **gates, **{name: value})


# ---- caches of refused calls ---------------------------------------------------------------------


def fused_kda_call() -> dict[str, Any]:
    heads, dim, batch = 1, 64, 2
    width = 3 * heads * dim
    return {
        "x": torch.randn(batch, width).to(BF16),
        "weight": torch.randn(3, 4, heads * dim),
        "conv_state": torch.randn(4, width, 3).to(BF16),
        "raw_gate": torch.randn(1, batch, heads, dim).to(BF16),
        "raw_beta": torch.randn(1, batch, heads).to(BF16),
        "A_log": torch.randn(heads),
        "dt_bias": torch.randn(heads, dim),
        "state_indices": torch.tensor([2, 1]),
        "state": torch.randn(4, heads, dim, dim),
        "output_gate": torch.randn(batch, heads, dim).to(BF16),
        "norm_weight": torch.ones(dim),
    }


def fused_gdn_call() -> dict[str, Any]:
    heads, dim, batch, hidden = 1, 64, 2, 16
    return {
        "hidden_states": torch.randn(batch, hidden).to(BF16),
        "w_ba": torch.randn(hidden, 2 * heads).to(BF16),
        "mixed_qkv": torch.randn(batch, 3 * dim).to(BF16),
        "conv_weight": torch.randn(3 * dim, 4),
        "conv_bias": torch.randn(3 * dim),
        "conv_state": torch.randn(4, 3 * dim, 3).to(BF16),
        "A_log": torch.randn(heads),
        "dt_bias": torch.randn(heads),
        "scale": None,
        "ssm_state": torch.randn(4, heads, dim, dim),
        "state_indices": torch.tensor([2, 1]),
    }


@pytest.mark.parametrize(
    ("api", "call", "changes", "message"),
    [
        (flashinfer.fused_kda_decode, fused_kda_call, {"lower_bound": 1.0}, "`lower_bound`"),
        (flashinfer.fused_kda_decode, fused_kda_call, {"norm_eps": float("nan")}, "`norm_eps`"),
        (
            flashinfer.fused_kda_decode, fused_kda_call,
            {"A_log": torch.zeros(1, dtype=torch.float64)}, "`A_log` must have dtype float32",
        ),
        (
            flashinfer.fused_kda_decode, fused_kda_call,
            {"state": torch.zeros(4, 1, 64, 64, dtype=torch.float64)}, "`state`",
        ),
        (gdn_decode.gdn_fused_decode_step, fused_gdn_call, {"scale": float("nan")}, "`scale`"),
        (
            gdn_decode.gdn_fused_decode_step, fused_gdn_call,
            {"A_log": torch.zeros(2)}, "`A_log` must have shape",
        ),
        (
            gdn_decode.gdn_fused_decode_step, fused_gdn_call,
            {"ssm_state": torch.zeros(4, 1, 128, 64)[:, :, ::2]}, "`ssm_state` must be contiguous",
        ),
    ],
)  # fmt: skip
@pytest.mark.compiler
@bindings
def test_a_refused_step_leaves_the_cache_of_inputs(
    api: Callable[..., Any], call: Callable[[], dict[str, Any]], changes: Any, message: str
) -> None:
    arguments = call() | changes
    before = arguments["conv_state"].clone()
    with pytest.raises(ValueError, match=message):
        api(**arguments)
    assert torch.equal(arguments["conv_state"], before)


# ---- packed sequences and slots ------------------------------------------------------------------


@bindings
def test_packed_sequences_have_a_beginning() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    recurrent = kda.usual("recurrent_kda", torch.device("cpu")) | {"cu_seqlens": none}
    prompt = _gdn2() | {"cu_seqlens": none, "output_final_state": True}
    for api, call in (
        (kda_decode.recurrent_kda, recurrent),
        (gdn_prefill.chunk_gated_delta_rule, prompt),
        (gdn_prefill.chunk_gated_delta_product, prompt),
        (chunk_gated_delta_rule2, prompt),
    ):
        with pytest.raises(ValueError, match=r"`cu_seqlens` must have at least one element"):
            api(**call)


def test_bounds_past_the_tokens_are_cut() -> None:
    q = torch.randn(4, 1, 32).half()
    beta = torch.rand(4, 1, 32)
    operands = {"g": None, "beta": beta, "w": None, "heads": 1, "normalize": False}
    exact = scale_by_channel(q, q, q, bounds=torch.tensor([0, 3, 4]), **operands)
    cut = scale_by_channel(q, q, q, bounds=torch.tensor([-9, 3, 99]), **operands)
    for found, expected in zip(cut, exact, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.compiler
@bindings
def test_final_states_may_be_given_without_being_asked_for() -> None:
    call = _gdn2() | {"output_state": torch.zeros(1, 1, 64, 64)}
    with pytest.raises(ValueError, match="CUDA tensor"):
        gdn_prefill.chunk_gated_delta_rule(**call)


@pytest.mark.parametrize("backend", [None, "cute-dsl", "cudnn", "cake"])
@pytest.mark.compiler
@bindings
def test_names_of_other_implementations(backend: str | None) -> None:
    call = kda.usual("recurrent_kda", torch.device("cpu")) | {"backend": backend}
    with pytest.raises(ValueError, match="CUDA tensor"):
        kda_decode.recurrent_kda(**call)


def test_rows_are_written_to_slots_that_there_are() -> None:
    pool, live = torch.zeros(3, 2), torch.ones(4, dtype=torch.bool)
    write_rows(pool, torch.tensor([5, 1, -1, 3]), torch.arange(8.0).view(4, 2), live)
    assert pool.tolist() == [[0, 0], [2, 3], [0, 0]]
    write_rows(pool[:0], torch.tensor([0]), torch.ones(1, 2), live[:1])


def test_slots_that_are_none_of_a_commit() -> None:
    slots = torch.tensor([-3, 0, 2, 5])
    assert replay.present_slots(slots, 2, 5).tolist() == [-3, 0, -1, -1]


@pytest.mark.parametrize("slot", [-7, 99])
def test_a_slot_that_the_pool_has_not_is_padding(slot: int) -> None:
    torch.manual_seed(0)
    call = mamba_call(intermediate_states_buffer=None, state=torch.randn(5, HEADS, DIM, STATE))
    call["state_batch_indices"] = torch.tensor([2, slot, 0])
    before = call["state"].clone()
    with flashinfer.reference_backend():
        out = selective_state_update(**call)
    assert not out[1].any() and out[0].any() and out[2].any()
    for untouched in (1, 3, 4):
        assert torch.equal(call["state"][untouched], before[untouched])
