"""Scales of NVFP4, under the names that callers of FlashInfer import.

The kernels here choose the block scale that maps a group's largest number to 6. The "four over six"
choice, which tries 4 as well and keeps the better, is described here and refused by the kernels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from .._common import checks

_LARGEST_E2M1 = 6.0
_LARGEST_E4M3 = 448.0
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class NVFP44Over6ErrMode(enum.IntEnum):
    """Errors that the four-over-six choice compares: sums of absolute or of squared ones."""

    MAE = 0
    MSE = 1


@dataclass(frozen=True)
class NVFP44Over6Config:
    """Options of the four-over-six choice.

    Attributes
    ----------
    e4m3_max : int
        Largest block scale, 448 or less.
    err_mode : NVFP44Over6ErrMode or str
        Which error the choice compares.
    err_use_fast_math : bool
        Whether the error may be computed with approximate instructions.
    """

    e4m3_max: int = 448
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def err_mode_name(self) -> str:
        """``"MAE"`` or ``"MSE"``."""
        mode = self.err_mode
        return mode.upper() if isinstance(mode, str) else NVFP44Over6ErrMode(mode).name


def nvfp4_e4m3_max(nvfp4_4over6_config: NVFP44Over6Config | None = None) -> float:
    """The largest block scale: that of the configuration, by default the largest e4m3 number."""
    return _LARGEST_E4M3 if nvfp4_4over6_config is None else float(nvfp4_4over6_config.e4m3_max)


def make_nvfp4_global_scale(
    input_tensor: torch.Tensor,
    per_token_activation: bool,
    global_scale: float | None = None,
    nvfp4_4over6_config: NVFP44Over6Config | None = None,
) -> torch.Tensor:
    """The factor that `nvfp4_quantize` takes: it maps the largest number to the largest NVFP4 one.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[..., k]``, floating point.
    per_token_activation : bool
        One factor for each row, ``[rows]``, instead of one for all.
    global_scale : float, optional
        A factor that is known already, positive.
    nvfp4_4over6_config : NVFP44Over6Config, optional
        Gives the largest block scale.

    Returns
    -------
    torch.Tensor
        float32, ``[1]`` or ``[rows]``, on the device of `input_tensor`; 1 where all numbers are 0,
        or there are none, and NaN where one is NaN.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    if not checks.tensor("input_tensor", input_tensor).is_floating_point() or not input_tensor.ndim:
        raise ValueError(
            "`input_tensor` must be floating point with a dimension at least, got "
            f"{input_tensor.dtype} {list(input_tensor.shape)}"
        )
    per_token = checks.flag("per_token_activation", per_token_activation)
    shape = (input_tensor.shape[:-1].numel(),) if per_token else (1,)
    if global_scale is not None:
        number = checks.number("global_scale", global_scale)
        if not _SMALLEST <= number <= _LARGEST:
            raise ValueError(
                f"`global_scale` must be positive and finite in float32, got {global_scale}"
            )
        return torch.full(shape, number, dtype=torch.float32, device=input_tensor.device)
    if not input_tensor.numel():
        return torch.ones(shape, dtype=torch.float32, device=input_tensor.device)
    largest = input_tensor.float().abs().reshape(*shape, -1).amax(-1)
    factor = nvfp4_e4m3_max(nvfp4_4over6_config) * _LARGEST_E2M1 / largest
    return torch.where(largest == 0, 1.0, factor)
