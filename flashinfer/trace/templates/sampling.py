"""Templates of softmax, sampling and the filters top-k, top-p and min-p.

A parameter may be one number or one per row, and outputs may be drawn from chosen rows. Templates
are made for what a call passes; those with a tensor for every parameter are the ones that are
listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._common.checks import optional_generator
from ..._common.dtypes import torch_name
from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .sampling_reference import (
    _chain_speculative_sampling_reference,
    _min_p_sampling_from_probs_reference,
    _sampling_from_logits_reference,
    _sampling_from_probs_reference,
    _softmax_reference,
    _top_k_mask_logits_reference,
    _top_k_renorm_probs_reference,
    _top_k_sampling_from_probs_reference,
    _top_k_top_p_sampling_from_logits_reference,
    _top_k_top_p_sampling_from_probs_reference,
    _top_p_renorm_probs_reference,
    _top_p_sampling_from_probs_reference,
)

_DESCRIPTIONS = {
    "temperature": "Divides the logits.",
    "top_k": "Elements to keep; less than 1: all.",
    "top_p": "Weight to keep, as a share of the row's.",
    "min_p": "Least share of the largest probability.",
    "seed": "Key of the random numbers.",
    "offset": "Counter of the random numbers.",
}
_DTYPES = {"top_k": "int32", "seed": "int64", "offset": "int64"}
_LOWEST = {"temperature": 0.0, "seed": -(2**63), "offset": -(2**63)}
_END = {"seed": 2**64, "offset": 2**64}
_VOCABULARY = "1 <= vocab_size <= 524288"  # sums of weights of more would not fit 64 bits
_EXAMPLES: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1}


# What is passed for a parameter: its name, dtype, and whether it is "one" number for all rows,
# "rows" with a number each, or a "column" of them.
_Passed = tuple[str, str, str]


def _passed_tensors(names: tuple[str, ...], arguments: Mapping[str, Any]) -> frozenset[_Passed]:
    """The parameters of a call that are tensors."""
    tensors = {n: v for n, v in arguments.items() if n in names and isinstance(v, torch.Tensor)}
    return frozenset(
        (name, torch_name(value.dtype), _kind(name, value)) for name, value in tensors.items()
    )


def _kind(name: str, value: torch.Tensor) -> str:
    if name == "seed" and value.ndim == 2:
        return "column"
    return "one" if name in ("seed", "offset") and value.numel() == 1 else "rows"


def _listed(names: tuple[str, ...]) -> frozenset[_Passed]:
    """A tensor of the usual dtype with a number per row, for every parameter."""
    return frozenset((name, _DTYPES.get(name, "float32"), "rows") for name in names)


def _parameter(name: str, passed: frozenset[_Passed], axis: str) -> Value:
    """One per row where the call passes a tensor, else a number."""
    usual, description = _DTYPES.get(name, "float32"), _DESCRIPTIONS[name]
    axes = {"one": ["one"], "rows": [axis], "column": [axis, "one"]}
    for key, dtype, kind in passed:
        if key == name:
            declared = dtype if _is_taken(name, dtype) else usual
            return Tensor(axes[kind], dtype=declared, description=description, layout="rows")
    lowest, end = _LOWEST.get(name), _END.get(name)
    return Scalar(usual, description=description, minimum=lowest, below=end)


def _is_taken(name: str, dtype: str) -> bool:
    """Whether a parameter may be a tensor of a dtype."""
    if name in ("seed", "offset"):
        return dtype in ("int64", "uint64")
    return "int" in dtype if name == "top_k" else not dtype.startswith("complex")


def _complete(
    kind: str, parameters: tuple[str, ...], valid: bool = False
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`init` of a template: distributions and sensible parameters in place of normal numbers."""

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        result = dict(arguments)
        if kind == "probs":
            result["probs"] = torch.softmax(arguments["probs"].float(), -1).to(
                arguments["probs"].dtype
            )
        for name in parameters:
            if name in ("seed", "offset"):
                number = torch.arange(len(result[name]), device=result[name].device)
                result[name] = number * 3 + 11
            else:
                result[name] = torch.full_like(result[name], _EXAMPLES[name]).to(
                    getattr(torch, _DTYPES.get(name, "float32"))
                )
        return {**result, "return_valid": True} if valid else result

    return init


def _draw_axes(passed: frozenset[_Passed], has_indices: bool) -> dict[str, Axis]:
    axes: dict[str, Axis] = {"batch_size": Var("Draws.")}
    if has_indices:
        axes["num_rows"] = Var("Distributions.")
    axes["vocab_size"] = Const("Elements of a distribution.", abbrev="v")
    if any(kind != "rows" for _, _, kind in passed):
        axes["one"] = Const("A number for all rows, or a column.", abbrev="", value=1)
    return axes


def _index_dtype(indices: Any) -> str | None:
    """The dtype of indices and tokens, or the one that indices of another must have."""
    if not isinstance(indices, torch.Tensor):
        return None
    return "int64" if indices.dtype == torch.int64 else "int32"


def _draw_trace(
    name: str, reference: Callable[..., Any], filters: tuple[str, ...], description: str
) -> Callable[..., TraceTemplate]:
    """Dispatch function of a draw: chooses by what is passed per row."""
    kind = "logits" if name.endswith("logits") else "probs"
    names = (*filters, "seed", "offset")

    @functools.cache
    def make(
        passed: frozenset[_Passed], absent: frozenset[str], indices: str | None, valid: bool
    ) -> TraceTemplate:
        row_axis = "batch_size" if indices is None else "num_rows"
        inputs: dict[str, Value] = {kind: Tensor([row_axis, "vocab_size"], dtypes=FLOATING,
                                                 layout="rows")}  # fmt: skip
        for n in filters:
            inputs[n] = _parameter(n, passed, row_axis)
        if indices is not None:
            inputs["indices"] = Tensor(
                ["batch_size"], dtype=indices, description="Row of each draw.", layout="rows"
            )
        for n in ("seed", "offset"):
            if n not in absent:
                inputs[n] = _parameter(n, passed, "batch_size")
        outputs: dict[str, Value] = {
            "samples": Tensor(["batch_size"], dtype=indices or "int32", description="Tokens.")
        }
        if valid:
            outputs["valid"] = Tensor(
                ["batch_size"], dtype="bool", description="Whether there was a distribution."
            )
        options: dict[str, tuple[Any, ...]] = {"check_nan": (False, True)}
        if kind == "probs":
            options["return_valid"] = (valid,)
        if len(filters) == 2:
            options["filter_apply_order"] = ("top_k_first", "joint")
        left_out = ["indices"] if indices is None else []
        options |= {n: (None,) for n in [*left_out, *sorted(absent)]}
        return TraceTemplate(
            op_type="sampling",
            name_prefix=name + ("_valid" if valid else ""),
            description=description,
            axes=_draw_axes(passed, indices is not None),
            inputs=inputs,
            outputs=outputs,
            constraints=[_VOCABULARY],
            options=options,
            hints=["deterministic"],
            tags=["status:verified"],
            reference=reference,
            init=_complete(kind, names, valid),
        )

    def dispatch(**arguments: Any) -> TraceTemplate:
        optional_generator("generator", arguments.get("generator"))
        absent = frozenset(n for n in ("seed", "offset") if arguments.get(n) is None)
        valid = bool(arguments.get("return_valid", False))
        indices = _index_dtype(arguments.get("indices"))
        return make(_passed_tensors(names, arguments), absent, indices, valid)

    dispatch.templates = [  # type: ignore[attr-defined]
        make(_listed(names), frozenset(), None, valid)
        for valid in ((False, True) if kind == "probs" else (False,))
    ]
    return dispatch


def _row_trace(
    name: str,
    reference: Callable[..., Any],
    parameter: str,
    description: str,
    hints: list[str],
    out_dtype: str | None = None,
) -> Callable[..., TraceTemplate]:
    """Dispatch function of an operation that changes rows by one parameter."""
    kind = "probs" if name.endswith("probs") else "logits"

    @functools.cache
    def make(passed: frozenset[_Passed] | None) -> TraceTemplate:
        inputs: dict[str, Value] = {
            kind: Tensor(["batch_size", "vocab_size"], dtypes=FLOATING, layout="rows")
        }
        options: dict[str, tuple[Any, ...]] = {}
        if passed is None:
            options[parameter] = (None,)
        else:
            inputs[parameter] = _parameter(parameter, passed, "batch_size")
        return TraceTemplate(
            op_type="sampling",
            name_prefix=name,
            description=description,
            axes={
                "batch_size": Var("Rows."),
                "vocab_size": Const("Elements of a row.", abbrev="v"),
            },
            inputs=inputs,
            outputs={
                "output": Tensor(
                    ["batch_size", "vocab_size"],
                    dtype=out_dtype,
                    dtype_from=None if out_dtype else kind,
                    layout="rows",
                )
            },
            constraints=[_VOCABULARY],
            options=options,
            hints=hints,
            tags=["status:verified"],
            reference=reference,
            init=_complete(kind, (parameter,)),
        )

    def dispatch(**arguments: Any) -> TraceTemplate:
        given = parameter != "temperature" or arguments.get(parameter) is not None
        return make(_passed_tensors((parameter,), arguments) if given else None)

    dispatch.templates = [make(_listed((parameter,)))]  # type: ignore[attr-defined]
    return dispatch


softmax_trace = _row_trace(
    "softmax", _softmax_reference, "temperature", "Softmax of each row of logits.",
    ["enable_pdl"], "float32",
)  # fmt: skip
top_k_renorm_probs_trace = _row_trace(
    "top_k_renorm_probs", _top_k_renorm_probs_reference, "top_k",
    "The largest elements of each row divided by their sum.", ["is_deterministic"],
)  # fmt: skip
top_p_renorm_probs_trace = _row_trace(
    "top_p_renorm_probs", _top_p_renorm_probs_reference, "top_p",
    "The nucleus of each row divided by its sum.", ["is_deterministic"],
)  # fmt: skip
top_k_mask_logits_trace = _row_trace(
    "top_k_mask_logits", _top_k_mask_logits_reference, "top_k",
    "The largest elements of each row, and -inf for the others.", [],
)  # fmt: skip
sampling_from_probs_trace = _draw_trace(
    "sampling_from_probs", _sampling_from_probs_reference, (), "One token per distribution."
)
sampling_from_logits_trace = _draw_trace(
    "sampling_from_logits", _sampling_from_logits_reference, (), "One token per row of logits."
)
top_p_sampling_trace = _draw_trace(
    "top_p_sampling_from_probs", _top_p_sampling_from_probs_reference, ("top_p",),
    "One token per distribution, from its nucleus.",
)  # fmt: skip
top_k_sampling_trace = _draw_trace(
    "top_k_sampling_from_probs", _top_k_sampling_from_probs_reference, ("top_k",),
    "One token per distribution, from its largest elements.",
)  # fmt: skip
min_p_sampling_trace = _draw_trace(
    "min_p_sampling_from_probs", _min_p_sampling_from_probs_reference, ("min_p",),
    "One token per distribution, from elements near the largest.",
)  # fmt: skip
top_k_top_p_sampling_trace = _draw_trace(
    "top_k_top_p_sampling_from_probs", _top_k_top_p_sampling_from_probs_reference,
    ("top_k", "top_p"), "One token per distribution, after top-k and top-p.",
)  # fmt: skip
top_k_top_p_sampling_from_logits_trace = _draw_trace(
    "top_k_top_p_sampling_from_logits", _top_k_top_p_sampling_from_logits_reference,
    ("top_k", "top_p"), "One token per row of logits, after top-k and top-p.",
)  # fmt: skip


def _complete_drafts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Distributions and tokens; the target has one position more than the drafts."""
    result = dict(arguments)
    drafts, target = arguments["draft_probs"], arguments["target_probs"]
    positions = drafts.shape[1] + 1
    target = target[:, :1].expand(-1, positions, -1) + 0.1 * torch.arange(
        positions, device=target.device
    ).view(1, -1, 1)
    result["draft_probs"] = torch.softmax(drafts, -1)
    result["target_probs"] = torch.softmax(target * 2, -1).contiguous()
    result["draft_token_ids"] = result["draft_probs"].argmax(-1).int()
    for name in ("seed", "offset"):
        result[name] = torch.arange(drafts.shape[0], device=drafts.device) + 5
    return result


def _chain_axes(passed: frozenset[_Passed]) -> dict[str, Axis]:
    axes: dict[str, Axis] = {
        "batch_size": Var("Requests."),
        "num_drafts": Const("Draft tokens of a request.", abbrev="n"),
        "num_positions": Const("num_drafts + 1.", abbrev="", derive=lambda v: v["num_drafts"] + 1),
        "vocab_size": Const("Elements of a distribution.", abbrev="v"),
    }
    if any(kind != "rows" for _, _, kind in passed):
        axes["one"] = Const("A number for all rows, or a column.", abbrev="", value=1)
    return axes


def _chain_trace() -> Callable[..., TraceTemplate]:
    @functools.cache
    def make(
        passed: frozenset[_Passed], absent: frozenset[str], added: frozenset[str]
    ) -> TraceTemplate:
        shape = ["batch_size", "num_drafts", "vocab_size"]
        inputs: dict[str, Value] = {
            "draft_probs": Tensor(shape, dtype="float32", layout="matrix", converts=True),
            "draft_token_ids": Tensor(shape[:2], dtype="int32", layout="matrix", converts=True),
            "target_probs": Tensor(
                ["batch_size", "num_positions", "vocab_size"],
                dtype="float32",
                layout="matrix",
                converts=True,
            ),
        }
        for n in ("seed", "offset"):
            if n not in absent:
                inputs[n] = _parameter(n, passed, "batch_size")
        counts = {
            "accepted": "maybe_output_accepted_token_num",
            "emitted": "maybe_output_emitted_draft_token_num",
        }
        outputs: dict[str, Value] = {
            "output_token_ids": Tensor(["batch_size", "num_positions"], dtype="int32")
        }
        for key, param in counts.items():
            if param in added:
                inputs[param] = Tensor(["batch_size"], dtype="int32", converts=True)
            outputs[key] = Tensor(["batch_size"], dtype="int32", param=param)
        options: dict[str, tuple[Any, ...]] = {n: (None,) for n in sorted(absent)}
        return TraceTemplate(
            op_type="sampling",
            name_prefix="chain_speculative_sampling",
            description="Draft tokens that the target model accepts, and one of its own.",
            axes=_chain_axes(passed),
            inputs=inputs,
            outputs=outputs,
            constraints=["num_positions == num_drafts + 1", _VOCABULARY],
            options=options,
            hints=["deterministic"],
            tags=["status:verified"],
            reference=_chain_speculative_sampling_reference,
            init=_complete_drafts,
        )

    def dispatch(**arguments: Any) -> TraceTemplate:
        optional_generator("generator", arguments.get("generator"))
        absent = frozenset(n for n in ("seed", "offset") if arguments.get(n) is None)
        added = {n for n, v in arguments.items() if n.startswith("maybe_") and v is not None}
        return make(_passed_tensors(("seed", "offset"), arguments), absent, frozenset(added))

    dispatch.templates = [  # type: ignore[attr-defined]
        make(_listed(("seed", "offset")), frozenset(), frozenset())
    ]
    return dispatch


chain_speculative_sampling_trace = _chain_trace()
