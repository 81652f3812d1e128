"""The operations that processors and fusion rules are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import sampling
from .._common.numbers import plain
from .op import ParameterizedOp
from .types import TaggedTensor, TensorType

_DRAW = ("indices", "generator", "check_nan", "seed", "offset")


class TemperatureOp(ParameterizedOp):
    """Logits divided by `temperature`; at 0 the maxima are 0 and all else -inf.

    So a softmax, whatever comes before it, gives what one with the temperature would.
    """

    IN = OUT = TensorType.LOGITS
    PARAMETERS = ("temperature",)

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        logits = self._checked(tensor).data
        temperature = _of_rows("temperature", self._get_param("temperature", kwargs), logits)
        if not isinstance(temperature, torch.Tensor):
            if not temperature >= 0:
                raise ValueError(f"`temperature` must not be negative, got {temperature}")
            if temperature > 0:
                return TaggedTensor.logits(logits / temperature)
            return TaggedTensor.logits(_only_maxima(logits))
        scaled = logits / temperature
        scaled = torch.where(temperature == 0, _only_maxima(logits).to(scaled.dtype), scaled)
        return TaggedTensor.logits(scaled.masked_fill(~(temperature >= 0), torch.nan))


def _of_rows(name: str, value: Any, rows: torch.Tensor) -> Any:
    """A number, or a column with one for each row, as sampling takes them."""
    if not isinstance(value, torch.Tensor):
        value = plain(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"`{name}` must be a number or a torch.Tensor, got {type(value).__name__}"
            )
        return value
    if value.numel() not in (1, len(rows)):
        raise ValueError(
            f"`{name}` must have one element or {len(rows)}, got shape {list(value.shape)}"
        )
    return value.reshape(-1, 1)


def _only_maxima(logits: torch.Tensor) -> torch.Tensor:
    largest = logits.amax(dim=-1, keepdim=True)
    is_less = (logits != largest) | (logits == -torch.inf)
    kept = torch.zeros_like(logits).masked_fill(is_less, -torch.inf)
    return kept + 0 * largest.masked_fill(largest.isinf(), 0)  # NaN if the row has one


class SoftmaxOp(ParameterizedOp):
    """Softmax of logits; of logits divided by `temperature` where `scaled`."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS
    scaled = False

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        temperature = self._get_param("temperature", kwargs) if self.scaled else None
        enable_pdl = self.default_params.get("enable_pdl")
        logits = self._checked(tensor).data
        return TaggedTensor.probs(sampling.softmax(logits, temperature, enable_pdl))


class TemperatureSoftmaxOp(SoftmaxOp):
    """Temperature and softmax in one kernel."""

    PARAMETERS = ("temperature",)
    scaled = True


class _FilterOp(ParameterizedOp):
    """One public function of a tensor and one parameter."""

    function: ClassVar[Callable[..., torch.Tensor]]

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        value = self._get_param(self.PARAMETERS[0], kwargs)
        return TaggedTensor(type(self).function(self._checked(tensor).data, value), self.OUT)


class LogitsTopKOp(_FilterOp):
    """All but the `top_k` largest logits become -inf."""

    IN = OUT = TensorType.LOGITS
    PARAMETERS = ("top_k",)
    function = staticmethod(sampling.top_k_mask_logits)


class ProbsTopKOp(_FilterOp):
    """The `top_k` largest probabilities, renormalised."""

    IN = OUT = TensorType.PROBS
    PARAMETERS = ("top_k",)
    function = staticmethod(sampling.top_k_renorm_probs)


class TopPOp(_FilterOp):
    """The nucleus, renormalised."""

    IN = OUT = TensorType.PROBS
    PARAMETERS = ("top_p",)
    function = staticmethod(sampling.top_p_renorm_probs)


def _min_p_renorm(probs: torch.Tensor, min_p: torch.Tensor | float) -> torch.Tensor:
    """What is at least `min_p` times the row's largest, renormalised; rows of zeros stay zero."""
    share = torch.as_tensor(_of_rows("min_p", min_p, probs), device=probs.device).float()
    weights = probs.float().clamp(min=0)
    least = share.clamp(0, 1) * weights.amax(dim=-1, keepdim=True)
    kept = weights.masked_fill(weights < least, 0) + 0 * least  # NaN if the row or `min_p` is
    total = kept.sum(dim=-1, keepdim=True)
    return (kept / total.masked_fill(total == 0, 1)).to(probs.dtype)


class MinPOp(_FilterOp):
    """What is at least `min_p` times the largest, renormalised; by PyTorch unless it is fused."""

    IN = OUT = TensorType.PROBS
    PARAMETERS = ("min_p",)
    function = staticmethod(_min_p_renorm)


class DrawOp(ParameterizedOp):
    """One token per row: a sampling function, the filters' parameters and those of the draw."""

    OUT = TensorType.INDICES
    FILTERS: ClassVar[tuple[str, ...]] = ()
    function: ClassVar[Callable[..., torch.Tensor]]
    fixed: ClassVar[dict[str, Any]] = {}

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        rows = self._checked(tensor).data
        filters = {name: self._get_param(name, kwargs) for name in self.FILTERS}
        draw = {name: self._get_param(name, kwargs, required=False) for name in _DRAW}
        draw["check_nan"] = False if draw["check_nan"] is None else draw["check_nan"]
        draw["deterministic"] = self.default_params.get("deterministic", True)
        tokens = type(self).function(rows, **filters, **draw, **self.fixed)
        return TaggedTensor.indices(tokens)


def _draw_op(
    name: str,
    takes: TensorType,
    function: Callable[..., torch.Tensor],
    filters: tuple[str, ...] = (),
    **fixed: Any,
) -> type[DrawOp]:
    members = {
        "__doc__": f"`{function.__name__}`.",
        "__module__": __name__,
        "IN": takes,
        "FILTERS": filters,
        "PARAMETERS": (*filters, *_DRAW),
        "function": staticmethod(function),
        "fixed": fixed,
    }
    return type(name, (DrawOp,), members)


_LOGITS, _PROBS = TensorType.LOGITS, TensorType.PROBS
_BOTH = ("top_k", "top_p")

LogitsSampleOp = _draw_op("LogitsSampleOp", _LOGITS, sampling.sampling_from_logits)
ProbsSampleOp = _draw_op("ProbsSampleOp", _PROBS, sampling.sampling_from_probs)
TopKSampleOp = _draw_op("TopKSampleOp", _PROBS, sampling.top_k_sampling_from_probs, ("top_k",))
TopPSampleOp = _draw_op("TopPSampleOp", _PROBS, sampling.top_p_sampling_from_probs, ("top_p",))
MinPSampleOp = _draw_op("MinPSampleOp", _PROBS, sampling.min_p_sampling_from_probs, ("min_p",))
TopKTopPSampleOp = _draw_op(
    "TopKTopPSampleOp", _PROBS, sampling.top_k_top_p_sampling_from_probs, _BOTH
)
JointTopKTopPSampleOp = _draw_op(
    "JointTopKTopPSampleOp",
    _PROBS,
    sampling.top_k_top_p_sampling_from_probs,
    _BOTH,
    filter_apply_order="joint",
)
LogitsTopKTopPSampleOp = _draw_op(
    "LogitsTopKTopPSampleOp", _LOGITS, sampling.top_k_top_p_sampling_from_logits, _BOTH
)
LogitsJointTopKTopPSampleOp = _draw_op(
    "LogitsJointTopKTopPSampleOp",
    _LOGITS,
    sampling.top_k_top_p_sampling_from_logits,
    _BOTH,
    filter_apply_order="joint",
)
