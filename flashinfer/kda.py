"""Kimi Delta Attention; see flashinfer.kda_decode."""

from .kda_decode import recurrent_kda as recurrent_kda

__all__ = ["recurrent_kda"]
