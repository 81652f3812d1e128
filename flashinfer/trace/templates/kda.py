"""Templates and references of Kimi Delta Attention: the recurrence, token by token, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .gated_delta_rule import delta_rule_recurrence, halved

_FLOATS = ("float32", "bfloat16", "float16")


def _decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Decays of the gate's inputs, or (without A_log) of their logarithms."""
    if A_log is None:
        return g.double().exp()
    bias = torch.zeros((), device=g.device) if dt_bias is None else dt_bias.view(g.shape[2:])
    rate, shifted = A_log.double().flatten()[:, None].exp(), g.double() + bias.double()
    if lower_bound is None:
        return torch.exp(-rate * F.softplus(shifted))
    return torch.exp(lower_bound * torch.sigmoid(rate * shifted))


def _kda_slots(
    name: str, indices: torch.Tensor | None, count: int, sequences: int
) -> list[list[int]]:
    """The `count` slots of each sequence; by default they lie one after the other."""
    if indices is None:
        return [[i * count + t for t in range(count)] for i in range(sequences)]
    if indices.ndim != 1 + (count > 1) or indices.numel() != count * sequences:
        shape = [sequences] if count == 1 else [sequences, count]
        raise ValueError(f"`{name}` must have shape {shape}, got {list(indices.shape)}")
    return indices.reshape(sequences, count).tolist()


def _kda_bounds(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[int]:
    """Where sequences begin in the tokens of all batches."""
    if cu_seqlens is None:
        return [i * q.shape[1] for i in range(q.shape[0] + 1)]
    if q.shape[0] != 1:
        raise ValueError(f"`q` must have one batch with `cu_seqlens`, got shape {list(q.shape)}")
    return [int(i) for i in cu_seqlens]


def _kda_checkpoints(
    pool: torch.Tensor,
    states: list[list[torch.Tensor]],
    starts: torch.Tensor,
    every: int,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """The pool with the state after every `every` tokens of each sequence."""
    kept = pool.double().clone()
    for i, of_sequence in enumerate(states):
        for j, state in enumerate(of_sequence[every - 1 :: every]):
            row = int(starts[i]) + j
            slot = row if indices is None else int(indices[row])
            if 0 <= slot < len(kept):
                kept[slot] = state
    return kept


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
) -> Any:
    """S = S diag(decay); S += beta (v - S k) k^T; output = scale S q, per token and head.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """
    decay = _decay(g, A_log, dt_bias, lower_bound)
    rate = torch.sigmoid(beta.double()) if beta_is_logit else beta.double()
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    tokens = [x.flatten(0, 1) for x in (q, k, v, decay, rate)]
    bounds = _kda_bounds(q, cu_seqlens)
    sequences = len(bounds) - 1
    slots = _kda_slots(
        "ssm_state_indices", ssm_state_indices, 1 + (num_spec_tokens or 0), sequences
    )
    sources, origin = slots, initial_state
    if initial_state_source is not None:
        sources = _kda_slots("initial_state_indices", initial_state_indices, 1, sequences)
        origin = initial_state_source
    out = torch.zeros(tokens[2].shape, dtype=torch.float64, device=v.device)
    zeros = out.new_zeros((sequences, v.shape[2], v.shape[3], q.shape[3]))
    pool = zeros if initial_state is None else initial_state.double().clone()
    if ssm_state_indices is None and sequences * len(slots[0] if slots else []) > len(pool):
        raise ValueError(f"`initial_state` must have the slots in use, got {list(pool.shape)}")
    every_state: list[list[torch.Tensor]] = []
    for i in range(sequences):
        accepted = 0 if num_accepted_tokens is None else int(num_accepted_tokens[i]) - 1
        slot = sources[i][min(max(accepted, 0), len(sources[i]) - 1)]
        every_state.append([])
        if not 0 <= slot < len(zeros if origin is None else origin):
            continue  # padding
        part = slice(bounds[i], bounds[i + 1])
        start = zeros[i] if origin is None else origin[slot].double()
        queries, keys, values, decays, rates = (x[part] for x in tokens)
        out[part], every_state[i] = delta_rule_recurrence(
            queries, keys, values, decays, rates, start, factor, use_qk_l2norm_in_kernel
        )
        left = every_state[i] if num_spec_tokens is not None else (every_state[i] or [start])[-1:]
        for target, state in zip(slots[i], left, strict=False):
            if 0 <= target < len(pool) and not disable_state_update:
                pool[target] = state
    results = [out.view(v.shape)]
    if initial_state is not None or output_final_state:
        results.append(pool)
    if state_checkpoints is not None and checkpoint_cu_starts is not None:
        results.append(
            _kda_checkpoints(
                state_checkpoints, every_state, checkpoint_cu_starts, checkpoint_every_n_tokens,
                checkpoint_state_indices,
            )
        )  # fmt: skip
    return tuple(results) if len(results) > 1 else results[0]


_AXES: dict[str, Axis] = {
    "batch_size": Var("Batches: sequences, or 1 with packed sequences."),
    "num_tokens": Var("Tokens of each batch."),
    "num_sequences": Var("Sequences.", from_values=True),
    "num_states": Var("States of the pool."),
    "num_source_states": Var("States of the pool that is read."),
    "len_indptr": Var("num_sequences + 1."),
    "num_slots_given": Var("Slots of all sequences, or of all tokens."),
    "num_checkpoints": Var("States of the pool of checkpoints."),
    "num_checkpoints_given": Var("Checkpoints of all sequences."),
    "num_heads": Const("Heads of q and k.", abbrev="h"),
    "num_v_heads": Const("Heads of v and of the state.", abbrev="hv"),
    "head_dim_k": Const("Elements of a key.", abbrev="k"),
    "head_dim_v": Const("Elements of a value.", abbrev="v"),
}
# Results do not depend on these, or there is no kernel that takes them.
_UNUSED = ["seq_order", "prefill_workspace", "correction_cache", "kg_cache"]
_GATE = ("A_log", "dt_bias", "lower_bound")
_SLOTS = ("ssm_state_indices", "num_spec_tokens", "num_accepted_tokens")
_CHECKPOINTS = ("state_checkpoints", "checkpoint_cu_starts", "checkpoint_state_indices")


def _tokens(heads: str, *dim: str, **properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_tokens", heads, *dim], layout="rows", **properties)


def _states(first: str = "num_states", **properties: Any) -> Tensor:
    return Tensor([first, "num_v_heads", "head_dim_v", "head_dim_k"], **properties)


def _indices(axis: str, description: str, **properties: Any) -> Tensor:
    kinds = {"dtypes": ("int32", "int64"), "optional": True}
    return Tensor([axis], description=description, **{**kinds, **properties})


class _Form(NamedTuple):
    """What a call takes and gives: a template each."""

    initial: bool  # it has an initial state
    final: bool  # it returns states
    gate: bool  # it computes the gate
    checkpoints: bool  # it keeps states on the way

    def inputs(self) -> dict[str, Value]:
        inputs: dict[str, Value] = {
            "q": _tokens("num_heads", "head_dim_k", dtypes=("bfloat16", "float16")),
            "k": _tokens("num_heads", "head_dim_k", dtype_from="q"),
            "v": _tokens("num_v_heads", "head_dim_v", dtype_from="q"),
            "g": _tokens("num_v_heads", "head_dim_k", dtypes=_FLOATS, description="Gate."),
            "beta": _tokens("num_v_heads", dtypes=_FLOATS, description="Learning rate."),
            "scale": Scalar(optional=True, description="Factor of the output; 1 / sqrt(dim)."),
        }
        if self.gate:
            inputs["A_log"] = Tensor(["num_v_heads"], dtype="float32", description="Decay's rate.")
            inputs["dt_bias"] = Tensor(["num_v_heads", "head_dim_k"], dtypes=_FLOATS, optional=True)
            inputs["lower_bound"] = Scalar(
                optional=True, below=0, description="Lowest logarithm of a decay."
            )
        inputs["cu_seqlens"] = _indices("len_indptr", "Where sequences begin.")
        if self.initial:
            inputs["initial_state"] = _states(dtypes=_FLOATS, description="Key axis last.")
            inputs["ssm_state_indices"] = _indices(
                "num_slots_given", "Slots of sequences or of their tokens; negative: none.",
                ranks=(1, 2),
            )  # fmt: skip
            inputs["num_spec_tokens"] = Scalar(
                "int32", optional=True, minimum=1, description="Tokens after a sequence's first."
            )
            inputs["num_accepted_tokens"] = _indices(
                "num_sequences", "Tokens of the last call that count.", dtypes=("int32",)
            )
        inputs["initial_state_source"] = _states(
            "num_source_states", **self.state_dtype(), optional=True, description="Pool to read."
        )
        inputs["initial_state_indices"] = _indices("num_sequences", "Slots in that pool.")
        if self.checkpoints:
            inputs["state_checkpoints"] = _states("num_checkpoints", **self.state_dtype())
            inputs["checkpoint_cu_starts"] = _indices(
                "len_indptr", "First checkpoint of each.", dtypes=("int64",), optional=False
            )
            inputs["checkpoint_every_n_tokens"] = Scalar("int32", minimum=1)
            inputs["checkpoint_state_indices"] = _indices("num_checkpoints_given", "Their slots.")
        return inputs

    def state_dtype(self) -> dict[str, Any]:
        """All pools of a call have one dtype."""
        if self.initial:
            return {"dtype_from": "initial_state"}
        return {"dtype": "float32"} if self.final else {"dtypes": _FLOATS}

    def outputs(self) -> dict[str, Value]:
        outputs: dict[str, Value] = {
            "output": _tokens("num_v_heads", "head_dim_v", param="output", dtype_from="q")
        }
        if self.initial:
            outputs["initial_state"] = _states(
                param="initial_state", dtype_from="initial_state", returned=self.final
            )
        elif self.final:
            outputs["final_state"] = _states("num_sequences", dtype="float32")
        if self.checkpoints:
            outputs["state_checkpoints"] = _states(
                "num_checkpoints", param="state_checkpoints", dtype_from="state_checkpoints"
            )
        return outputs

    def suffix(self) -> str:
        names = ("gate", "initial", "final", "checkpoints")
        return "".join(f"_{name}" for name in names if getattr(self, name))

    def unused(self) -> list[str]:
        """Arguments that the call leaves out."""
        return [
            *_UNUSED,
            *(() if self.initial else ("initial_state", *_SLOTS)),
            *(() if self.gate else _GATE),
            *(() if self.checkpoints else _CHECKPOINTS),
        ]

    def complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments that a call may have, from random ones."""
        arguments = halved(arguments)
        flags = {"output_final_state": self.final, "use_gate_in_kernel": self.gate}
        extra: dict[str, Any]
        extra = {"lower_bound": -5.0} if self.gate else {"g": -arguments["g"].abs()}
        if self.initial:  # a state for each sequence
            states = arguments["initial_state"]
            rows = torch.arange(len(arguments["q"]), device=states.device) % len(states)
            extra["initial_state"] = states[rows].contiguous()
        if self.checkpoints:
            count = len(arguments["q"])
            starts = torch.arange(count + 1, device=arguments["q"].device)
            pool = arguments["state_checkpoints"]
            extra["checkpoint_every_n_tokens"] = max(arguments["q"].shape[1] // 2 + 1, 1)
            extra["checkpoint_cu_starts"] = starts
            extra["state_checkpoints"] = pool[starts % len(pool)].contiguous()
        return {**arguments, **flags, **extra}

    def nest(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        states = results[1] if self.final else None
        return (results[0], states, results[-1]) if self.checkpoints else (results[0], states)


def _predict_sequences(arguments: Mapping[str, Any]) -> dict[str, Any]:
    bounds = arguments.get("cu_seqlens")
    count = arguments["q"].shape[0] if bounds is None else bounds.shape[0] - 1
    return {"num_sequences": count}


def _template(form: _Form) -> TraceTemplate:
    options: dict[str, tuple[Any, ...]] = {
        "use_qk_l2norm_in_kernel": (True, False),
        "beta_is_logit": (False, True),
        "disable_state_update": (False, True),
        "output_final_state": (form.final,),
        "use_gate_in_kernel": (form.gate,),
        "backend": ("auto", "flashinfer", None, "cute-dsl", "cudnn", "cake"),
    }
    if not form.checkpoints:
        options["checkpoint_every_n_tokens"] = (0,)
    return TraceTemplate(
        op_type="kda",
        name_prefix=f"recurrent_kda{form.suffix()}",
        description="Delta rule with a decay per key channel, over the tokens of each sequence.",
        axes=_AXES,
        inputs=form.inputs(),
        outputs=form.outputs(),
        options=options,
        unsupported=form.unused(),
        constraints=["head_dim_k in (32, 64, 128, 256)"],
        tags=["status:verified"],
        reference=_reference,
        init=form.complete,
        predict=_predict_sequences,
        nest=form.nest,
    )


_TEMPLATES = {
    form: _template(form)
    for form in (_Form(*flags) for flags in itertools.product((False, True), repeat=4))
}


def recurrent_kda_trace(**arguments: Any) -> TraceTemplate:
    """The template for the states that the call takes and gives, and for its gate."""
    return _TEMPLATES[
        _Form(
            arguments.get("initial_state") is not None,
            bool(arguments.get("output_final_state")),
            bool(arguments.get("use_gate_in_kernel")),
            arguments.get("state_checkpoints") is not None,
        )
    ]


recurrent_kda_trace.templates = list(_TEMPLATES.values())  # type: ignore[attr-defined]
