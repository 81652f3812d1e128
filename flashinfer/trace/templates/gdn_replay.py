"""Templates and references of drafts whose inputs are kept and replayed, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .gated_delta_rule import (
    DECODE_AXES,
    _distinct_slots,
    decode,
    delta_rule_recurrence,
    gated_delta_rule_mtp_trace,
    halved,
)

_WINDOWS = ("rawv", "rawk", "g", "beta")


def _caching_reference(
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
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """As gated_delta_rule_mtp without an update: S = decay S; S += rate (v - S k) k^T; the windows
    receive k, v, log(decay) and rate.

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    out, pool = decode(
        q, k, v, initial_state, (A_log, a, dt_bias, b), scale, use_qk_l2norm,
        initial_state_indices, output_state_indices, True,
    )  # fmt: skip
    log = -A_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    kept = (v, k, log, torch.sigmoid(b.double()))
    results = []
    windows = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    for window, given in zip(windows, kept, strict=True):
        assert window is not None
        changed = window.double().clone()
        for i, slot in enumerate(initial_state_indices.tolist()):
            if 0 <= slot < len(changed):
                changed[slot, :, : given.shape[1]] = given[i].double().transpose(0, 1)
        results.append(changed)
    return (out, pool, *results)


def _commit_reference(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    track_state_indices: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
) -> torch.Tensor:
    """S = exp(g) S; S += beta (v - S k) k^T, for the accepted tokens of each slot and layer.

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    pool = checkpoint_state.double().clone()
    for layer in range(len(pool)):
        for i, slot in enumerate(state_indices.tolist()):
            if slot == null_block_id or not 0 <= slot < checkpoint_state.shape[1]:
                continue  # padding
            tokens = (x[layer, slot].transpose(0, 1) for x in (rawk_cache, rawv_cache))
            k, v = tokens
            gates = (g_cache[layer, slot].double().exp().T, beta_cache[layer, slot].T)
            start = checkpoint_state[layer, slot]
            _, states = delta_rule_recurrence(k, k, v, *gates, start, 1.0, use_qk_l2norm)
            accepted = int(accept_lens[i])
            if track_steps is not None and track_state_indices is not None:
                step, target = int(track_steps[i]), int(track_state_indices[i])
                known = 0 <= target < pool.shape[1] and target != null_block_id
                if 0 <= step < len(states) and known:
                    pool[layer, target] = states[step]
            if 0 < accepted <= len(states):
                pool[layer, slot] = states[accepted - 1]
    return pool


_WINDOW_AXES: dict[str, Axis] = {"num_kept": Var("Tokens of a window.")}


def _window(field: str, *before: str, like: str | None = None, **properties: Any) -> Tensor:
    """Keys and values have the dtype of `like`, gates are float32."""
    heads = "num_heads" if field == "rawk" else "num_v_heads"
    dim = {"rawv": ["head_dim_v"], "rawk": ["head_dim_k"]}.get(field)
    dims = [*before, "num_slots", heads, "num_kept", *(dim or ())]
    if dim is None:
        return Tensor(dims, dtype="float32", **properties)
    return Tensor(dims, dtype_from=like, **properties)


def _kept(**properties: Any) -> dict[str, Value]:
    """The windows of one layer, as arguments of gated_delta_rule_mtp."""
    names = {field: f"replayssm_{field}" for field in _WINDOWS}
    return {
        name: _window(field, like="q", param=name, **properties) for field, name in names.items()
    }


def _draw_caching(arguments: dict[str, Any]) -> dict[str, Any]:
    arguments = _distinct_slots(halved(arguments))
    slots = len(arguments["initial_state"])
    for field, like in (("rawv", "v"), ("rawk", "k"), ("g", "a"), ("beta", "a")):
        tensor = arguments[like]
        dtype = tensor.dtype if field.startswith("raw") else torch.float32
        shape = (slots, tensor.shape[2], tensor.shape[1] + 1, *tensor.shape[3:])
        arguments[f"replayssm_{field}"] = torch.zeros(shape, dtype=dtype, device=tensor.device)
    return {**arguments, "cache_replayssm": True}


_MTP = gated_delta_rule_mtp_trace
_caching = TraceTemplate(
    op_type="gdn",
    name_prefix="gated_delta_rule_mtp_replayssm",
    description="Gated delta rule for a draft, whose inputs are kept.",
    axes={**_MTP.axes, **_WINDOW_AXES},
    inputs={**_MTP.inputs, **_kept()},
    outputs={**_MTP.outputs, **_kept(returned=False)},
    options={
        **_MTP.options,
        "disable_state_update": (None, True),
        "cache_replayssm": (True,),
    },
    unsupported=["ssm_state_indices", "intermediate_states_buffer"],
    constraints=["num_kept >= num_tokens"],
    tags=["status:verified", "stage:decode"],
    reference=_caching_reference,
    init=_draw_caching,
)


def gated_delta_rule_mtp_replayssm_trace(**arguments: Any) -> TraceTemplate:
    """The template for a draft whose inputs are kept, or of which they are not."""
    return _caching if arguments.get("cache_replayssm") else _MTP


gated_delta_rule_mtp_replayssm_trace.templates = [_MTP, _caching]  # type: ignore[attr-defined]


def _draw_commit(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three sequences, the second padding, over two layers of four slots."""
    generator = torch.Generator().manual_seed(3)
    given = arguments["rawk_cache"]
    dtype = given.dtype if given.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(given.device)

    def indices(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=given.device)

    return {
        "checkpoint_state": values(2, 4, 4, 24, 32),
        "rawv_cache": values(2, 4, 4, 3, 24).to(dtype),
        "rawk_cache": values(2, 4, 2, 3, 32).to(dtype),
        "g_cache": -values(2, 4, 4, 3).abs(),
        "beta_cache": values(2, 4, 4, 3).sigmoid(),
        "state_indices": indices(2, -1, 0),
        "accept_lens": indices(2, 1, 0),
    }


_STATE = ["num_layers", "num_slots", "num_v_heads", "head_dim_v", "head_dim_k"]
_COMMIT_AXES: dict[str, Axis] = {
    "num_layers": Var("Layers."),
    **{name: axis for name, axis in DECODE_AXES.items() if name != "num_tokens"},
    **_WINDOW_AXES,
}
_SEQUENCES: dict[str, Value] = {
    name: Tensor(
        ["batch_size"], dtypes=("int32", "int64"), optional=optional, description=description
    )
    for name, optional, description in (
        ("state_indices", False, "Slot of each sequence; negative: padding."),
        ("accept_lens", False, "Tokens that count."),
        ("track_state_indices", True, "Slot of another state."),
        ("track_steps", True, "Token after which that is; negative: none."),
    )
}
gated_delta_rule_replayssm_commit_trace = TraceTemplate(
    op_type="gdn",
    name_prefix="gated_delta_rule_replayssm_commit",
    description="States after the accepted tokens of drafts whose inputs were kept, all layers.",
    axes=_COMMIT_AXES,
    inputs={
        "checkpoint_state": Tensor(_STATE, dtypes=("float32", "bfloat16", "float16")),
        "rawv_cache": _window("rawv", "num_layers", dtypes=("bfloat16", "float16")),
        "rawk_cache": _window("rawk", "num_layers", like="rawv_cache"),
        "g_cache": _window("g", "num_layers", description="Logarithm of the decay."),
        "beta_cache": _window("beta", "num_layers", description="Learning rate."),
        **_SEQUENCES,
        "null_block_id": Scalar("int32", description="Slot that is padding."),
    },
    outputs={
        "checkpoint_state": Tensor(_STATE, param="checkpoint_state", dtype_from="checkpoint_state")
    },
    options={"use_qk_l2norm": (True, False), "backend": ("auto", "simt")},
    constraints=[
        "head_dim_k in (32, 64, 128, 256)",
        "num_v_heads % num_heads == 0",
    ],
    tags=["status:verified", "stage:decode"],
    reference=_commit_reference,
    init=_draw_commit,
)
