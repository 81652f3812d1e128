"""What a call of `cutlass_fused_moe` means: checks of its arguments, in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._common import checks
from ..quantization._kernels import SCALE_BLOCK
from ..tllm_enums import ActivationType, normalize_activation_type
from . import four_bit

HALF = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn

ACTIVATIONS = {
    ActivationType.Swiglu: "swiglu_gate_last",
    ActivationType.SwigluBias: "swiglu_gate_last",
    ActivationType.Geglu: "geglu_gate_last",
    ActivationType.Relu2: "relu2",
    ActivationType.Identity: "identity",
}
"""Activations that there are kernels for, by what the products call them."""

_MULTIPLES = {"none": 8, "tensor": 16, "block": SCALE_BLOCK, "four_bit": 32}
_SWIGLU = (ActivationType.Swiglu, ActivationType.SwigluBias)


def kernel_activation(activation_type: int | ActivationType) -> str:
    """The products' name of an activation.

    Raises
    ------
    ValueError
        If there is no such activation, or no kernel for it.
    """
    activation = normalize_activation_type(activation_type)
    if activation not in ACTIVATIONS:
        allowed = ", ".join(known.name for known in ACTIVATIONS)
        raise ValueError(f"`activation_type` must be one of {allowed}, got {activation.name}")
    return ACTIVATIONS[activation]


def refuse(**given: tuple[Any, Any]) -> None:
    """Refuse arguments that differ from the only value that is supported: name=(got, allowed)."""
    for name, (got, allowed) in given.items():
        if got is not allowed and (allowed is None or type(got) is not int or got != allowed):
            shown = type(got).__name__ if isinstance(got, torch.Tensor) else repr(got)
            raise ValueError(f"`{name}` must be {allowed} on Hopper, got {shown}")


def shard(size_name: str, size: Any, rank_name: str, rank: Any) -> tuple[int, int]:
    """Number of shards and number of this one."""
    size = checks.count(size_name, size)
    return size, checks.count(rank_name, rank, 0, size - 1)


def find_scheme(
    fc1_dtype: torch.dtype, use_deepseek_fp8_block_scale: Any, use_w4_group_scaling: Any
) -> str:
    """How operands are quantised: a scheme of `Experts`."""
    is_block = checks.flag("use_deepseek_fp8_block_scale", use_deepseek_fp8_block_scale)
    if checks.flag("use_w4_group_scaling", use_w4_group_scaling):
        if is_block:
            raise ValueError(
                "`use_w4_group_scaling` and `use_deepseek_fp8_block_scale` may not both be True"
            )
        return "four_bit"
    if is_block:
        return "block"
    return "tensor" if fc1_dtype == E4M3 else "none"


@dataclass(frozen=True)
class Weights:
    """The weights of a call, and what decides whether they fit together."""

    fc1: torch.Tensor
    fc2: torch.Tensor
    activation: ActivationType
    scheme: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, elements of a token and elements between the products."""
        experts, hidden, intermediate = self.fc2.shape
        return experts, hidden, intermediate * (2 if self.scheme == "four_bit" else 1)

    def check(self, input: torch.Tensor) -> None:
        """Shapes and dtypes of input and weights."""
        checks.tensor("input", input, 2)
        checks.tensor("fc1_expert_weights", self.fc1, 3)
        checks.tensor("fc2_expert_weights", self.fc2, 3)
        checks.dtype("input", input.dtype, (E4M3,) if self.scheme == "tensor" else HALF)
        self._check_dtypes(input.dtype)
        experts, hidden, intermediate = self.sizes
        codes = 2 if self.scheme == "four_bit" else 1
        columns = intermediate * (2 if self.activation.is_gated else 1)
        if self.fc1.shape != (experts, columns, hidden // codes) or not 1 <= experts <= 1024:
            raise ValueError(
                f"`fc1_expert_weights` must be [experts, {columns}, {hidden // codes}] for at most "
                f"1024 experts, {self.activation.name} and `fc2_expert_weights` "
                f"{list(self.fc2.shape)}, got {list(self.fc1.shape)}"
            )
        if input.shape[1] != hidden:
            raise ValueError(
                f"`input` must be [tokens, {hidden}] as `fc1_expert_weights` says, got "
                f"{list(input.shape)}"
            )
        multiple = _MULTIPLES[self.scheme]
        if hidden % multiple or intermediate % multiple or 0 in self.fc2.shape:
            raise ValueError(
                f"`fc2_expert_weights` must be [experts, hidden, intermediate] with multiples of "
                f"{multiple} elements, got {list(self.fc2.shape)}"
            )

    def _check_dtypes(self, input_dtype: torch.dtype) -> None:
        expected = {"none": input_dtype, "four_bit": torch.uint8}.get(self.scheme, E4M3)
        for name, weight in (("fc1_expert_weights", self.fc1), ("fc2_expert_weights", self.fc2)):
            if self.scheme == "four_bit" and weight.dtype != expected:
                raise ValueError(
                    f"`use_w4_group_scaling` needs `{name}` of torch.uint8, two codes a byte, got "
                    f"{weight.dtype}"
                )
            checks.dtype(name, weight.dtype, (expected,))

    def scales(
        self, quant_scales: Sequence[torch.Tensor] | None, input_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """The scales that `Experts` takes."""
        if quant_scales is not None and not isinstance(quant_scales, (list, tuple)):
            raise TypeError(
                f"`quant_scales` must be a list of tensors or None, got "
                f"{type(quant_scales).__name__}"
            )
        given = tuple(quant_scales or ())
        if self.scheme == "four_bit":
            given = four_bit.as_bytes(given)
            four_bit.check_scales(given, (self.fc1, self.fc2), input_dtype)
            return given
        count = {"none": 0, "block": 2, "tensor": 4}[self.scheme]
        if len(given) != count:
            raise ValueError(
                f"`quant_scales` must have {count} tensors for these weights, got {len(given)}"
            )
        experts, columns, hidden = self.fc1.shape
        intermediate = self.fc2.shape[2]
        shapes: tuple[tuple[int, ...], ...] = ((experts,), (), (experts,), ())
        if self.scheme == "block":
            shapes = (
                (experts, -(-columns // SCALE_BLOCK), hidden // SCALE_BLOCK),
                (experts, hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK),
            )
        for i, (scale, shape) in enumerate(zip(given, shapes, strict=False)):
            name = f"quant_scales[{i}]"
            checks.tensor(name, scale)
            checks.dtype(name, scale.dtype, (torch.float32,))
            is_one = self.scheme == "tensor" and scale.numel() == 1
            is_each = self.scheme == "tensor" and scale.shape == (experts,)
            if not is_one and not is_each and scale.shape != shape:
                raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(scale.shape)}")
        return given[:3]

    def biases(
        self, fc1: torch.Tensor | None, fc2: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The biases, checked."""
        for name, bias, weight in (
            ("fc1_expert_biases", fc1, self.fc1),
            ("fc2_expert_biases", fc2, self.fc2),
        ):
            if bias is None:
                continue
            if self.scheme in ("block", "tensor"):
                raise ValueError(f"`{name}` must be None for 8-bit weights")
            checks.tensor(name, bias)
            checks.dtype(name, bias.dtype, (dtype,))
            if bias.shape != weight.shape[:2]:
                raise ValueError(
                    f"`{name}` must have shape {list(weight.shape[:2])}, got {list(bias.shape)}"
                )
        return fc1, fc2

    def gate(self, **constants: torch.Tensor | None) -> tuple[Any, Any, Any] | None:
        """alpha, beta and limit of SwiGLU; None if it has none."""
        if all(constant is None for constant in constants.values()):
            return None
        result: list[Any] = []
        for (name, constant), default in zip(constants.items(), (1.0, 0.0, math.inf), strict=True):
            if constant is None:
                result.append(default)
                continue
            if self.activation not in _SWIGLU:
                raise ValueError(f"`{name}` must be None for {self.activation.name}")
            checks.tensor(name, constant)
            checks.dtype(name, constant.dtype, (torch.float32,))
            if constant.shape != self.fc1.shape[:1]:
                raise ValueError(
                    f"`{name}` must have shape [{self.fc1.shape[0]}], got {list(constant.shape)}"
                )
            result.append(constant)
        return (result[0], result[1], result[2])


def check_routing(
    tokens: int, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor
) -> None:
    """Shapes and dtypes of the tokens' choices."""
    checks.contiguous("token_selected_experts", token_selected_experts, 2)
    checks.dtype("token_selected_experts", token_selected_experts.dtype, (torch.int32, torch.int64))
    checks.contiguous("token_final_scales", token_final_scales, 2)
    checks.dtype("token_final_scales", token_final_scales.dtype, (torch.float32,))
    shape = token_selected_experts.shape
    if shape[0] != tokens or shape[1] < 1:
        raise ValueError(
            f"`token_selected_experts` must be [{tokens}, top_k] as `input` has {tokens} tokens, "
            f"got {list(shape)}"
        )
    if token_final_scales.shape != shape:
        raise ValueError(
            f"`token_final_scales` must have shape {list(shape)}, got "
            f"{list(token_final_scales.shape)}"
        )


def check_workspace(name: str, workspace: torch.Tensor | None, device: torch.device) -> None:
    """A contiguous vector where the tokens are."""
    if workspace is None:
        return
    checks.contiguous(name, workspace, 1)
    if workspace.device != device:
        raise ValueError(f"`{name}` must be on {device} as the tokens, got {workspace.device}")
