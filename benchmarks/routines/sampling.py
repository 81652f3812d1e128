"""Softmax, sampling with its filters, and top-k."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .base import Arguments, Backend, Flag, Routine, dtype_name, positive, register, torch_dtype

_SHAPE = [
    Flag("batch_size", positive, 64, "rows"),
    Flag("vocab_size", positive, 128256, "elements of a row"),
    Flag("input_dtype", dtype_name, "float32", "dtype of logits, probabilities or scores"),
    Flag("spread", float, 3.0, "standard deviation of the logits"),
]
_PARAMETERS = {
    "temperature": Flag("temperature", float, 1.0, "divides the logits"),
    "top_k": Flag("top_k", int, 50, "elements to keep"),
    "top_p": Flag("top_p", float, 0.9, "weight to keep"),
    "min_p": Flag("min_p", float, 0.1, "least share of the largest probability"),
    "k": Flag("k", positive, 50, "elements to choose"),
}


def _routine(
    name: str,
    rows: str,
    parameters: Sequence[str] = (),
    *,
    module: str = "sampling",
    draws: bool = False,
    fresh: Callable[[Arguments], int] | None = None,
    peer: Backend | None = None,
) -> None:
    """Register one function of `rows` ("logits", "probs" or "input") and numbers."""

    def build(case: Namespace, device: str) -> Arguments:
        values = torch.randn(case.batch_size, case.vocab_size, device=device) * case.spread
        if rows == "probs":
            values = torch.softmax(values, -1)
        arguments: Arguments = {rows: values.to(torch_dtype(case.input_dtype))}
        arguments |= {name: getattr(case, name) for name in parameters}
        if draws:
            arguments["seed"] = torch.arange(case.batch_size, device=device)
        return arguments

    api = f"flashinfer.{module}:{name}"
    register(
        Routine(
            name=name,
            api=api,
            flags=[*_SHAPE, *(_PARAMETERS[name] for name in parameters)],
            build=build,
            reads=[rows],
            writes=[],
            fresh=fresh,
            backends={"cuda": Backend(api)} | ({"torch": peer} if peer else {}),
        )
    )


def _like(rows: str) -> Callable[[Arguments], int]:
    def fresh(arguments: Arguments) -> int:
        tensor: torch.Tensor = arguments[rows]
        return tensor.numel() * tensor.element_size()

    return fresh


def _torch_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.softmax(logits.float() / temperature, -1)


def _torch_top_k(input: torch.Tensor, k: int) -> Any:
    indices = input.topk(k, sorted=False).indices.sort(-1).values
    return input.gather(-1, indices), indices


_routine(
    "softmax",
    "logits",
    ["temperature"],
    fresh=lambda arguments: 4 * arguments["logits"].numel(),
    peer=Backend(_torch_softmax),
)
_routine("sampling_from_probs", "probs", draws=True)
_routine("sampling_from_logits", "logits", draws=True)
_routine("top_p_sampling_from_probs", "probs", ["top_p"], draws=True)
_routine("top_k_sampling_from_probs", "probs", ["top_k"], draws=True)
_routine("min_p_sampling_from_probs", "probs", ["min_p"], draws=True)
_routine("top_k_top_p_sampling_from_probs", "probs", ["top_k", "top_p"], draws=True)
_routine("top_k_top_p_sampling_from_logits", "logits", ["top_k", "top_p"], draws=True)
_routine("top_k_renorm_probs", "probs", ["top_k"], fresh=_like("probs"))
_routine("top_p_renorm_probs", "probs", ["top_p"], fresh=_like("probs"))
_routine("top_k_mask_logits", "logits", ["top_k"], fresh=_like("logits"))
_routine("top_k", "input", ["k"], module="topk", peer=Backend(_torch_top_k))
