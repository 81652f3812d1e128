"""Templates and references of hyper-connections.

The references compute in float64 and return unrounded results: whoever uses them rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..._common import checks
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate


def _mhc_post_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """out[n] = post[n] * x + sum over m of comb[m, n] * residual[m].

    Source: Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.
    """
    mixed = comb_res_mix.double().transpose(-1, -2) @ residual.double()
    return mixed + post_layer_mix.double().reshape(*x.shape[:-1], 4, 1) * x.double().unsqueeze(-2)


def _mhc_pre_reference(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates by sigmoids, a matrix by Sinkhorn's iterations, and the gated sum of the streams.

    Source: Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025; R. Sinkhorn, P.
    Knopp, "Concerning nonnegative matrices and doubly stochastic matrices", 1967.
    """
    tokens = residual.shape[:-2]
    mix = dot_mix.double().sum(dim=0).reshape(*tokens, 24)
    squares = sqrsum.double().sum(dim=0).reshape(tokens)
    mix = mix * torch.rsqrt(squares / k + rms_eps).unsqueeze(-1)
    scales = mhc_scale.double().repeat_interleave(torch.tensor([4, 4, 16], device=mix.device))
    pre, post, comb = (mix * scales + mhc_base.double()).split((4, 4, 16), dim=-1)
    pre = torch.sigmoid(pre) + mhc_pre_eps
    matrix = torch.softmax(comb.reshape(*tokens, 4, 4), dim=-1) + mhc_sinkhorn_eps
    for step in range(2 * int(sinkhorn_repeat) - 1):
        across = -1 if step % 2 else -2
        matrix = matrix / (matrix.sum(dim=across, keepdim=True) + mhc_sinkhorn_eps)
    layer_input = (pre.unsqueeze(-1) * residual.double()).sum(dim=-2)
    return mhc_post_mult_value * torch.sigmoid(post).unsqueeze(-1), matrix, layer_input


def _mhc_pre_with_prenorm_reference(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As mhc_pre_big_fuse, with the squares of the streams.

    Source: as mhc_pre_big_fuse.
    """
    tokens = residual.shape[:-2]
    size = residual.shape[-2] * residual.shape[-1]
    mix = dot_mix.double().reshape(*tokens, 24)
    squares = residual.double().square().sum(dim=(-2, -1))
    mix = mix * torch.rsqrt(squares / size + rms_eps).unsqueeze(-1)
    scales = mhc_scale.double().repeat_interleave(torch.tensor([4, 4, 16], device=mix.device))
    pre, post, comb = (mix * scales + mhc_base.double()).split((4, 4, 16), dim=-1)
    pre = torch.sigmoid(pre) + mhc_pre_eps
    matrix = torch.softmax(comb.reshape(*tokens, 4, 4), dim=-1) + mhc_sinkhorn_eps
    for step in range(2 * int(sinkhorn_repeat) - 1):
        across = -1 if step % 2 else -2
        matrix = matrix / (matrix.sum(dim=across, keepdim=True) + mhc_sinkhorn_eps)
    layer_input = (pre.unsqueeze(-1) * residual.double()).sum(dim=-2)
    return mhc_post_mult_value * torch.sigmoid(post).unsqueeze(-1), matrix, layer_input


BLOCK_SIZES = (0, *range(64, 1025, 32))
_RANKS = range(3, 9)
_STREAMS = ["num_tokens", "streams", "hidden_size"]
_RESIDUAL = Tensor(_STREAMS, dtypes=("bfloat16", "float16"), ranks=_RANKS, layout="contiguous")
_ROW = ["num_tokens", "hidden_size"]


def _axes(**more: Axis) -> dict[str, Axis]:
    return {
        "num_tokens": Var("Tokens; all leading dimensions together."),
        "streams": Const("Residual streams of a token.", abbrev="", value=4),
        "hidden_size": Const("Elements of a stream.", abbrev="h"),
        **more,
    }


def _floats(*axes: str, **properties: Any) -> Tensor:
    return Tensor(list(axes), dtype="float32", layout="contiguous", **properties)


def _numbers(**more: Value) -> dict[str, Value]:
    return {
        **more,
        "rms_eps": Scalar(minimum=0, description="Added to the mean square."),
        "mhc_pre_eps": Scalar(minimum=0, description="Added to the gates of the layer's input."),
        "mhc_sinkhorn_eps": Scalar(minimum=0, description="Added to the softmax and to each sum."),
        "mhc_post_mult_value": Scalar(description="Factor of the gates of the layer's output."),
        "sinkhorn_repeat": Scalar("int32", minimum=1, description="Divisions of the columns."),
    }


def _post_gather(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`post_layer_mix` without a last dimension of 1."""
    post, residual = arguments["post_layer_mix"], arguments["residual"]
    are_tensors = isinstance(post, torch.Tensor) and isinstance(residual, torch.Tensor)
    if are_tensors and post.ndim == residual.ndim and post.shape[-1] == 1:
        return {**arguments, "post_layer_mix": post.squeeze(-1)}
    return dict(arguments)


def _pre_gather(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Splits and tokens as one dimension each."""
    gathered = dict(arguments)
    residual = checks.tensor("residual", arguments["residual"], *_RANKS)
    checks.choice("block_size", arguments.get("block_size", 0), BLOCK_SIZES)
    outer = tuple(residual.shape[:-2])
    splits = arguments.get("num_splits", 1)
    for name, trailing in (("dot_mix", (24,)), ("sqrsum", ())):
        tensor = arguments.get(name)
        if not isinstance(tensor, torch.Tensor):
            continue
        shapes = [(splits, *outer, *trailing)] + [(*outer, *trailing)] * (splits == 1)
        if tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"`{name}` must have shape {list(shapes[-1])}, got {list(tensor.shape)}"
            )
        if tensor.is_contiguous():
            gathered[name] = tensor.reshape(splits, math.prod(outer), *trailing)
    return gathered


def _pre_example(arguments: dict[str, Any]) -> dict[str, Any]:
    """An example call of 16 bits, whose squares are positive."""
    residual = torch.cat([arguments["residual"]] * 8, dim=-1)
    if residual.dtype == torch.float32:
        residual = residual.bfloat16()
    changed: dict[str, Any] = {"residual": residual}
    if "sqrsum" in arguments:
        k = residual.shape[-2] * residual.shape[-1]
        changed |= {"k": k, "sqrsum": arguments["sqrsum"].abs() * k + k}
        changed["num_splits"] = len(arguments["dot_mix"])
    return {**arguments, **changed, "sinkhorn_repeat": 20, "mhc_post_mult_value": 1.5}


def _post_example(arguments: dict[str, Any]) -> dict[str, Any]:
    rows = {name: torch.cat([arguments[name]] * 8, dim=-1) for name in ("x", "residual")}
    if rows["x"].dtype == torch.float32:
        rows = {name: tensor.bfloat16() for name, tensor in rows.items()}
    return {**arguments, **rows}


mhc_post_trace = TraceTemplate(
    op_type="mhc",
    name_prefix="mhc_post",
    description="Streams mixed among one another, and a layer's output added to each.",
    axes=_axes(),
    inputs={
        "x": Tensor(_ROW, dtype_from="residual", ranks=range(2, 8), layout="contiguous"),
        "residual": _RESIDUAL,
        "post_layer_mix": _floats("num_tokens", "streams", ranks=range(2, 8)),
        "comb_res_mix": _floats("num_tokens", "streams", "streams", ranks=_RANKS),
    },
    outputs={"out": Tensor(_STREAMS, dtype_from="residual")},
    constraints=["hidden_size % 8 == 0", "streams == 4"],
    tags=["status:verified", "fused"],
    reference=_mhc_post_reference,
    gather=_post_gather,
    init=_post_example,
)


def _pre_template(name: str, inputs: dict[str, Value], reference: Any, **axes: Axis) -> Any:
    return TraceTemplate(
        op_type="mhc",
        name_prefix=name,
        description="A token's weights from their projection, and the layer's input.",
        axes=_axes(mixes=Const("4 of pre, 4 of post, 16 of comb.", abbrev="", value=24), **axes),
        inputs=inputs,
        outputs={
            "post_mix": Tensor(["num_tokens", "streams", "one"], dtype="float32"),
            "comb_mix": Tensor(["num_tokens", "streams", "streams"], dtype="float32"),
            "layer_input": Tensor(_ROW, dtype_from="residual"),
        },
        constraints=["hidden_size % 8 == 0", "streams == 4", "parts == 3", "mixes == 24"],
        tags=["status:verified", "fused"],
        reference=reference,
        gather=_pre_gather,
        init=_pre_example,
    )


_WEIGHTS: dict[str, Value] = {
    "residual": _RESIDUAL,
    "mhc_scale": _floats("parts", description="Of pre, post and comb."),
    "mhc_base": _floats("mixes"),
}
_SMALL: dict[str, Axis] = {
    "parts": Const("Pre, post and comb.", abbrev="", value=3),
    "one": Const("", abbrev="", value=1),
}


def _dots(splits: str) -> Tensor:
    return _floats(splits, "num_tokens", "mixes", description="Projection of the streams.")


mhc_pre_big_fuse_trace = _pre_template(
    "mhc_pre_big_fuse",
    {
        "dot_mix": _dots("splits"),
        "sqrsum": _floats("splits", "num_tokens", description="Sums of squares."),
        **_WEIGHTS,
        **_numbers(k=Scalar("int32", minimum=1, description="Elements behind each sum.")),
    },
    _mhc_pre_reference,
    splits=Var("Parts of the projection, which are added."),
    **_SMALL,
)
mhc_pre_big_fuse_with_prenorm_trace = _pre_template(
    "mhc_pre_big_fuse_with_prenorm",
    {"dot_mix": _dots("one"), **_WEIGHTS, **_numbers()},
    _mhc_pre_with_prenorm_reference,
    **_SMALL,
)
