"""Weights of bfloat16 checkpoints in the forms that mixtures of experts read: plain PyTorch.

Both weights are as `cutlass_fused_moe` says: ``[experts, columns, hidden]``, values (up) before
gates, and ``[experts, hidden, intermediate]``. Results are dictionaries: ``fc1`` and ``fc2``, and
the tensors of `quant_scales` as ``scale0`` and so on.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common import checks
from .layouts import (
    interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm,
)
from .layouts import (
    interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm,
)

_E4M3_MAX = 448.0
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
_MX_GROUP = 32
_BLOCK = 128


def _check_weights(
    w1: torch.Tensor,
    w2: torch.Tensor,
    sizes: tuple[int, int, int],
    activation: Any,
    multiple: int = 1,
) -> None:
    experts, hidden, intermediate = sizes
    columns = intermediate * (2 if activation is None or activation.is_gated else 1)
    shapes = [experts, columns, hidden], [experts, hidden, intermediate]
    for name, weight, shape in (("w1_bf16", w1, shapes[0]), ("w2_bf16", w2, shapes[1])):
        checks.tensor(name, weight, 3)
        checks.dtype(name, weight.dtype, (torch.bfloat16,))
        if list(weight.shape) != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {list(weight.shape)}")
    for name, size in (("hidden_size", hidden), ("intermediate_size", intermediate)):
        if size % multiple:
            raise ValueError(f"`{name}` must be a multiple of {multiple}, got {size}")


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 8 bits, and a factor for 128 by 128 elements."""
    experts, rows, k = weight.shape
    padded = -(-rows // _BLOCK) * _BLOCK
    full = torch.nn.functional.pad(weight.float(), (0, 0, 0, padded - rows))
    tiles = full.view(experts, padded // _BLOCK, _BLOCK, k // _BLOCK, _BLOCK)
    scale = tiles.abs().amax((2, 4)).clamp(min=1e-10) / _E4M3_MAX
    codes = (tiles / scale[:, :, None, :, None]).view(experts, padded, k)[:, :rows]
    return codes.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).contiguous(), scale


def _tensors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 8 bits, and a factor for each expert."""
    scale = weight.float().abs().amax((1, 2)).clamp(min=1e-10) / _E4M3_MAX
    codes = weight.float() / scale[:, None, None]
    return codes.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two e2m1 codes a byte, and exponents of powers of two for 32 elements.

    The largest magnitude of a group gets the largest exponent of e2m1, 2.
    """
    experts, rows, k = weight.shape
    groups = weight.float().view(experts, rows, k // _MX_GROUP, _MX_GROUP)
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 3
    exponent = torch.where(largest > 0, exponent, -127).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent[..., None]).flatten(-2)
    bounds = torch.tensor(_E2M1_BOUNDS, device=weight.device)
    magnitude = _nearest_even(scaled.abs(), bounds)
    codes = (magnitude | (scaled < 0).to(torch.uint8) << 3).view(experts, rows, k // 2, 2)
    packed = codes[..., 0] | codes[..., 1] << 4
    return packed.contiguous(), (exponent + 127).to(torch.uint8)


def _nearest_even(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The nearest magnitude's code; the even one of two that are as near."""
    above = torch.bucketize(x, bounds, right=True)  # a bound itself goes up
    below = torch.bucketize(x, bounds)
    return torch.where(above % 2 == 0, above, below).to(torch.uint8)


def _view(
    device: torch.device | None, fc1: torch.Tensor, fc2: torch.Tensor, *scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    named = {"fc1": fc1, "fc2": fc2}
    named |= {f"scale{i}": scale for i, scale in enumerate(scales)}
    return {name: tensor.to(device or tensor.device) for name, tensor in named.items()}


def prepare_cutlass_bf16_weights(
    w1_bf16: torch.Tensor,
    w2_bf16: torch.Tensor,
    *,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Any = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The weights as they are; `activation` (a SwiGLU if None) says how many columns the first has.

    Raises
    ------
    TypeError, ValueError
        If a weight has another shape or dtype.
    """
    sizes = num_local_experts, hidden_size, intermediate_size
    _check_weights(w1_bf16, w2_bf16, sizes, activation)
    return _view(device, w1_bf16.contiguous(), w2_bf16.contiguous())


def prepare_cutlass_fp8_block_weights(
    w1_bf16: torch.Tensor,
    w2_bf16: torch.Tensor,
    *,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Any = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """float8_e4m3fn codes and float32 factors of 128 by 128 elements; sizes are multiples of 128.

    Raises
    ------
    TypeError, ValueError
        If a weight has another shape or dtype.
    """
    sizes = num_local_experts, hidden_size, intermediate_size
    _check_weights(w1_bf16, w2_bf16, sizes, activation, _BLOCK)
    (fc1, scale1), (fc2, scale2) = _blocks(w1_bf16), _blocks(w2_bf16)
    return _view(device, fc1, fc2, scale1, scale2)


def prepare_cutlass_fp8_per_tensor_weights(
    w1_bf16: torch.Tensor,
    w2_bf16: torch.Tensor,
    *,
    hidden_states_scale_global: float | torch.Tensor,
    intermediate_scale_global: float | torch.Tensor,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Any = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """float8_e4m3fn codes, and the four factors that `cutlass_fused_moe` takes.

    Parameters
    ----------
    hidden_states_scale_global, intermediate_scale_global : float or torch.Tensor
        Values of the input's and of the hidden rows' code 1.
    w1_bf16, w2_bf16, num_local_experts, hidden_size, intermediate_size, activation, device
        As for `prepare_cutlass_bf16_weights`.

    Raises
    ------
    TypeError, ValueError
        If a weight has another shape or dtype.
    """
    sizes = num_local_experts, hidden_size, intermediate_size
    _check_weights(w1_bf16, w2_bf16, sizes, activation, 16)
    (fc1, scale1), (fc2, scale2) = _tensors(w1_bf16), _tensors(w2_bf16)
    first, second = (
        torch.as_tensor(scale, dtype=torch.float32, device=w1_bf16.device).reshape(1)
        for scale in (hidden_states_scale_global, intermediate_scale_global)
    )
    return _view(device, fc1, fc2, scale1 * first, 1.0 / second, scale2 * second, first)


def prepare_cutlass_fp8_per_tensor_activations(
    hidden_states_bf16: torch.Tensor, *, hidden_states_scale_global: float | torch.Tensor
) -> tuple[torch.Tensor, None]:
    """float8_e4m3fn codes of ``hidden_states_bf16 / hidden_states_scale_global``, and no scale."""
    checks.tensor("hidden_states_bf16", hidden_states_bf16, 2)
    scaled = hidden_states_bf16.float() / hidden_states_scale_global
    return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), None


def prepare_cutlass_w4a16_weights(
    w1_bf16: torch.Tensor,
    w2_bf16: torch.Tensor,
    *,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Any = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """MXFP4 codes and exponents; sizes are multiples of 32.

    Raises
    ------
    TypeError, ValueError
        If a weight has another shape or dtype.

    Notes
    -----
    Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023, section 6.3.
    """
    sizes = num_local_experts, hidden_size, intermediate_size
    _check_weights(w1_bf16, w2_bf16, sizes, activation, _MX_GROUP)
    (fc1, scale1), (fc2, scale2) = _mxfp4(w1_bf16), _mxfp4(w2_bf16)
    return _view(device, fc1, fc2, scale1, scale2)
