"""Kimi Delta Attention; see flashinfer.kda_decode and flashinfer.kda_prefill."""

from .kda_decode import recurrent_kda as recurrent_kda
from .kda_prefill import RecurrentKDAPrefillWrapper as RecurrentKDAPrefillWrapper

__all__ = ["RecurrentKDAPrefillWrapper", "recurrent_kda"]
