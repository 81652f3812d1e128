"""Templates and references of the gated delta rule: the recurrence, token by token, in float64.

`backend` and the hints choose a kernel, never a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate

_STATES = ("float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")


def _of_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The head of each of `heads` state heads: [tokens, heads, dim]."""
    index = torch.arange(heads, device=tensor.device) * tensor.shape[1] // heads
    return tensor.double()[:, index]


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def delta_rule_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    normalize: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs [tokens, heads, dim] and the state after each token of one sequence, in float64.

    `decay` is [tokens, heads] or, by key channel, [tokens, heads, head_dim_k].
    """
    heads = state.shape[0]
    q, k, v = (_of_heads(x, heads) for x in (q, k, v))
    if normalize:
        q, k = _normalize(q), _normalize(k)
    decay, beta, state = decay.double(), beta.double(), state.double()
    if decay.ndim == 2:
        decay = decay[..., None]
    outputs, states = [], []
    for t in range(q.shape[0]):
        state = state * decay[t][:, None, :]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + delta[..., None] * k[t][:, None, :]
        outputs.append(scale * torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    out = torch.stack(outputs) if outputs else v.new_zeros((0, heads, v.shape[2]))
    return out, states


def _softplus_decay(A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    return torch.exp(-A_log.double().exp() * F.softplus(a.double() + dt_bias.double()))


def _slots(indices: torch.Tensor | None, batch: int) -> list[int]:
    return list(range(batch)) if indices is None else [int(i) for i in indices.flatten()[:batch]]


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | None,
    normalize: bool,
    read: torch.Tensor | None,
    write: torch.Tensor | None,
    frozen: bool,
    token_slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and pool after a decode call."""
    A_log, a, dt_bias, b = gates
    decay, beta = _softplus_decay(A_log, a, dt_bias), torch.sigmoid(b.double())
    batch = q.shape[0]
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    new_pool = pool.double().clone()
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    read_slots = _slots(read, batch)
    write_slots = read_slots if write is None else _slots(write, batch)
    for i, (source, target) in enumerate(zip(read_slots, write_slots, strict=True)):
        if not 0 <= source < len(pool):
            continue
        out[i], states = delta_rule_recurrence(
            q[i], k[i], v[i], decay[i], beta[i], pool[source], factor, normalize
        )
        if token_slots is not None:
            for t, state in enumerate(states):
                if 0 <= int(token_slots[i, t]) < len(pool):
                    new_pool[int(token_slots[i, t])] = state
        elif not frozen and 0 <= target < len(pool) and states:
            new_pool[target] = states[-1]
    return out, new_pool


def _pretranspose_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
) -> Any:
    """S = decay S; S += beta (v - S k) k^T; output = scale S q, per token and head.

    decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).
    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    pool = initial_state if state is None else state
    assert pool is not None
    return decode(
        q, k, v, pool, (A_log, a, dt_bias, b), scale, use_qk_l2norm, initial_state_indices,
        output_state_indices, disable_state_update,
    )  # fmt: skip


def _mtp_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
) -> Any:
    """As gated_delta_rule_decode_pretranspose, for several tokens: S = decay S + ...

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    frozen = disable_state_update is None or disable_state_update
    return decode(
        q, k, v, initial_state, (A_log, a, dt_bias, b), scale, use_qk_l2norm,
        initial_state_indices, output_state_indices, frozen,
        ssm_state_indices,
    )  # fmt: skip


def _bf16_state_reference(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
) -> Any:
    """As gated_delta_rule_mtp: S = decay S + ...

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    assert q is not None and k is not None and v is not None and b is not None
    assert initial_state_source is not None
    return decode(
        q, k, v, initial_state_source, (A_log, a, dt_bias, b), scale, use_qk_l2norm_in_kernel,
        initial_state_indices, output_state_indices, disable_state_update, ssm_state_indices,
    )  # fmt: skip


def _chunk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    state_indices: torch.Tensor | None = None,
) -> Any:
    """S = g S; S += beta (v - S k) k^T; output = scale S q, per token, head and sequence.

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    assert cu_seqlens is not None
    heads, total = max(q.shape[1], v.shape[1]), q.shape[0]
    ones = torch.ones((total, heads), dtype=torch.float64, device=q.device)
    decay, rate = (ones if x is None else x for x in (g, beta))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    bounds = [int(i) for i in cu_seqlens]
    out = torch.zeros((total, heads, v.shape[2]), dtype=torch.float64, device=q.device)
    slots = _slots(state_indices, len(bounds) - 1)
    finals, checkpoints = list[torch.Tensor](), list[torch.Tensor]()
    zeros = out.new_zeros((heads, v.shape[2], k.shape[2]))
    for slot, part in zip(slots, map(slice, bounds[:-1], bounds[1:]), strict=True):
        if initial_state is not None and not 0 <= slot < len(initial_state):  # padding
            finals.append(zeros if output_state is None else output_state[len(finals)].double())
            continue
        start = zeros if initial_state is None else initial_state[slot].double()
        out[part], states = delta_rule_recurrence(
            q[part], k[part], v[part], decay[part], rate[part], start, factor,
            use_qk_l2norm_in_kernel,
        )  # fmt: skip
        finals.append(states[-1] if states else start)
        if every := checkpoint_every_n_tokens:
            checkpoints += states[every - 1 :: every]
    results: list[torch.Tensor] = [out]
    if output_final_state:
        final = torch.stack(finals) if finals else out.new_zeros(0, heads, v.shape[2], k.shape[2])
        if state_indices is not None and output_state is None:
            assert initial_state is not None
            pool = initial_state.double().clone()
            known = [i for i, slot in enumerate(slots) if 0 <= slot < len(pool)]
            pool[[slots[i] for i in known]] = final[known]
            final = pool
        results.append(final)
    if state_checkpoints is not None:
        kept = state_checkpoints.double().clone()
        kept[: len(checkpoints)] = torch.stack(checkpoints) if checkpoints else kept[:0]
        results.append(kept)
    return tuple(results) if len(results) > 1 else out


# ---- templates -----------------------------------------------------------------------------------

DECODE_AXES: dict[str, Axis] = {
    "batch_size": Var("Sequences."),
    "num_tokens": Var("Tokens of each sequence."),
    "num_slots": Var("States of the pool."),
    "num_heads": Const("Heads of q and k.", abbrev="h"),
    "num_v_heads": Const("Heads of v and of the state.", abbrev="hv"),
    "head_dim_k": Const("Elements of a key.", abbrev="k"),
    "head_dim_v": Const("Elements of a value.", abbrev="v"),
}


def tokens_of(heads: str, dim: str, **properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_tokens", heads, dim], layout="rows", **properties)


def _gate(**properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_tokens", "num_v_heads"], dtypes=_STATES, **properties)


def _pool(first: str = "num_slots", **properties: Any) -> Tensor:
    return Tensor([first, "num_v_heads", "head_dim_v", "head_dim_k"], **properties)


def _indices(description: str, optional: bool = True) -> Tensor:
    kinds = ("int32", "int64")
    return Tensor(["batch_size"], dtypes=kinds, optional=optional, description=description)


DECODE_INPUTS: dict[str, Value] = {
    "q": tokens_of("num_heads", "head_dim_k", dtypes=_HALF),
    "k": tokens_of("num_heads", "head_dim_k", dtype_from="q"),
    "v": tokens_of("num_v_heads", "head_dim_v", dtype_from="q"),
}
GATES: dict[str, Value] = {
    "A_log": Tensor(["num_v_heads"], dtype="float32", description="Logarithm of the decay's rate."),
    "a": _gate(description="Input of the decay."),
    "dt_bias": Tensor(["num_v_heads"], dtypes=_STATES, description="Added to a."),
    "b": _gate(description="Input of the learning rate."),
    "scale": Scalar(optional=True, description="Factor of the output; 1 / sqrt(head_dim_k)."),
}


def _distinct_slots(arguments: dict[str, Any]) -> dict[str, Any]:
    """Slots that differ, as many as the pool has; the first sequences are padding if there are too
    few."""
    pool = arguments.get("initial_state")
    if pool is None:
        pool = arguments["initial_state_source"]
    for name in ("initial_state_indices", "output_state_indices"):
        if arguments.get(name) is not None:
            count, slots = arguments[name].shape[0], pool.shape[0]
            values = torch.arange(count, device=arguments[name].device)
            arguments[name] = torch.where(values < slots, values, -1).to(torch.int32)
    return arguments


def halved(arguments: dict[str, Any]) -> dict[str, Any]:
    """Queries, keys and values in bfloat16 where they are in float32, which no kernel takes."""
    for name in ("q", "k", "v"):
        if arguments[name].dtype == torch.float32:
            arguments[name] = arguments[name].bfloat16()
    return arguments


def _decode_template(mtp: bool) -> TraceTemplate:
    """For a state per sequence, or (mtp) for a pool of states with slots."""
    state = "initial_state" if mtp else "state"
    first = "num_slots" if mtp else "batch_size"
    inputs = {**DECODE_INPUTS, state: _pool(first, dtypes=_STATES, description="Key axis last.")}
    if mtp:
        inputs["initial_state_indices"] = _indices("Slot read; negative: padding.", False)
        inputs["output_state_indices"] = _indices("Slot written; by default the slot read.")
        kept = (f"replayssm_{name}" for name in ("rawv", "rawk", "g", "beta"))
        unused = ["ssm_state_indices", *kept]
    else:
        unused = ["initial_state", "initial_state_indices", "output_state_indices"]
    options: dict[str, tuple[Any, ...]] = {
        "use_qk_l2norm": (True, False),
        "disable_state_update": (None, False, True) if mtp else (False, True),
        **({"cache_replayssm": (False,)} if mtp else {"backend": ("auto", "flashinfer")}),
    }
    return TraceTemplate(
        op_type="gdn",
        name_prefix="gated_delta_rule_mtp" if mtp else "gated_delta_rule_decode",
        description="Gated delta rule for the next tokens of each sequence, state in place.",
        axes={k: v for k, v in DECODE_AXES.items() if mtp or k != "num_slots"},
        inputs={**inputs, **GATES},
        outputs={
            "output": tokens_of("num_v_heads", "head_dim_v", param="output", dtype_from="q"),
            state: _pool(first, param=state, dtype_from=state, returned=True),
        },
        options=options,
        unsupported=[*unused, "intermediate_states_buffer"],
        tags=["status:verified", "stage:decode"],
        reference=_mtp_reference if mtp else _pretranspose_reference,
        init=(lambda arguments: _distinct_slots(halved(arguments))) if mtp else halved,
    )


gated_delta_rule_decode_pretranspose_trace = _decode_template(mtp=False)
gated_delta_rule_mtp_trace = _decode_template(mtp=True)

gated_delta_rule_bf16_state_trace = TraceTemplate(
    op_type="gdn",
    name_prefix="gated_delta_rule_bf16_state",
    description="Gated delta rule for the next tokens of each sequence, state in place.",
    axes=DECODE_AXES,
    inputs={
        **{key: GATES[key] for key in ("A_log", "a", "dt_bias")},
        **DECODE_INPUTS,
        "b": GATES["b"],
        "initial_state_source": _pool(dtypes=_STATES, description="States, key dimension last."),
        "initial_state_indices": _indices("Slot read; negative: padding."),
        "output_state_indices": _indices("Slot written; by default the slot read."),
        "scale": GATES["scale"],
    },
    outputs={
        "output": tokens_of("num_v_heads", "head_dim_v", param="output", dtype_from="q"),
        "initial_state_source": _pool(
            param="initial_state_source", dtype_from="initial_state_source", returned=False
        ),
    },
    options={
        "use_qk_l2norm_in_kernel": (True, False),
        "disable_state_update": (False, True),
        "softplus_beta": (1.0,),
        "softplus_threshold": (20.0,),
        "recovery_steps": (0,),
        "disable_output": (False,),
    },
    unsupported=["intermediate_states_buffer", "accepted_steps", "ssm_state_indices"],
    tags=["status:verified", "stage:decode"],
    reference=_bf16_state_reference,
    init=lambda arguments: _distinct_slots(halved(arguments)),
)


def _chunk_init(arguments: dict[str, Any], final: bool) -> dict[str, Any]:
    """Offsets that rise from 0 to the number of tokens, and as many heads of states as belong."""
    total, count = arguments["q"].shape[0], arguments["cu_seqlens"].shape[0]
    arguments = halved(arguments)
    arguments["output_final_state"] = final
    heads = max(arguments["q"].shape[1], arguments["v"].shape[1])
    state = arguments.get("initial_state")
    if state is not None:
        count = state.shape[0] + 1
        arguments["initial_state"] = state[:, :1].repeat(1, heads, 1, 1)
    bounds = torch.linspace(0, total, count).long()
    arguments["cu_seqlens"] = bounds.to(arguments["cu_seqlens"].device)
    return arguments


def _chunk_axes(initial: bool) -> dict[str, Axis]:
    return {
        "num_tokens": Var("Tokens of all sequences."),
        "num_sequences": Var("Sequences.", from_values=not initial),
        "len_indptr": Var("num_sequences + 1."),
        "num_q_heads": Const("Heads of q.", abbrev="q"),
        "num_k_heads": Const("Heads of k.", abbrev="kh"),
        "num_v_heads": Const("Heads of v.", abbrev="hv"),
        "num_state_heads": Const(
            "The larger of the numbers of heads of q and v.",
            abbrev="",
            derive=lambda sizes: max(sizes["num_q_heads"], sizes["num_v_heads"]),
        ),
        "head_dim_k": Const("Elements of a key.", abbrev="k"),
        "head_dim_v": Const("Elements of a value.", abbrev="v"),
    }


def _predict_sequences(arguments: Mapping[str, Any]) -> dict[str, Any]:
    bounds = arguments["cu_seqlens"]
    return {} if bounds is None else {"num_sequences": bounds.shape[0] - 1}


def _chunk_template(final: bool, initial: bool) -> TraceTemplate:
    def heads(name: str, dim: str, **properties: Any) -> Tensor:
        return Tensor(["num_tokens", name, dim], layout="rows", **properties)

    def states(**properties: Any) -> Tensor:
        return Tensor(
            ["num_sequences", "num_state_heads", "head_dim_v", "head_dim_k"], **properties
        )

    gates = {"dtype": "float32", "optional": True}
    inputs: dict[str, Value] = {
        "q": heads("num_q_heads", "head_dim_k", dtypes=_HALF),
        "k": heads("num_k_heads", "head_dim_k", dtype_from="q"),
        "v": heads("num_v_heads", "head_dim_v", dtype_from="q"),
        "g": Tensor(["num_tokens", "num_state_heads"], **gates, description="Decay; 1."),  # type: ignore[arg-type]
        "beta": Tensor(["num_tokens", "num_state_heads"], **gates, description="Rate; 1."),  # type: ignore[arg-type]
        "scale": Scalar(optional=True, description="Factor of the output; 1 / sqrt(head_dim_k)."),
        "cu_seqlens": Tensor(["len_indptr"], dtypes=("int64", "int32"), description="Begins."),
    }
    if initial:
        inputs["initial_state"] = states(dtypes=_STATES)
    outputs: dict[str, Value] = {
        "output": heads("num_state_heads", "head_dim_v", param="output", dtype_from="q")
    }
    if final:
        dtype = {"dtype_from": "initial_state"} if initial else {"dtype": "float32"}
        in_place_of = "initial_state" if initial else None
        outputs["final_state"] = states(param="output_state", in_place_of=in_place_of, **dtype)
    larger = "(num_q_heads, num_v_heads)[num_q_heads < num_v_heads]"
    constraints = [f"num_state_heads == {larger}", "len_indptr == num_sequences + 1"]
    unused = ["state_checkpoints", "checkpoint_cu_starts", "state_indices", "_cp_chunk_len"]
    unused += ["max_seqlen"] if initial else ["max_seqlen", "initial_state"]
    unused += [] if final else ["output_state"]
    suffix = ("_initial" if initial else "") + ("_final" if final else "")
    return TraceTemplate(
        op_type="gdn",
        name_prefix=f"chunk_gated_delta_rule{suffix}",
        description="Gated delta rule over packed sequences.",
        axes=_chunk_axes(initial),
        inputs=inputs,
        outputs=outputs,
        options={
            "use_qk_l2norm_in_kernel": (False, True),
            "output_final_state": (final,),
            "checkpoint_every_n_tokens": (0,),
            "use_cp": ("auto", True, False),
            "backend": ("auto", "flashinfer"),
        },
        unsupported=unused,
        constraints=constraints[: 1 + initial],
        tags=["status:verified", "stage:prefill"],
        reference=_chunk_reference,
        init=lambda arguments: _chunk_init(arguments, final),
        predict=_predict_sequences,
    )


_CHUNK = {
    (final, initial): _chunk_template(final, initial)
    for final in (False, True)
    for initial in (False, True)
}


def chunk_gated_delta_rule_trace(**arguments: Any) -> TraceTemplate:
    """The template for the states that the call takes and gives."""
    return _CHUNK[
        bool(arguments.get("output_final_state")), arguments.get("initial_state") is not None
    ]


chunk_gated_delta_rule_trace.templates = list(_CHUNK.values())  # type: ignore[attr-defined]
