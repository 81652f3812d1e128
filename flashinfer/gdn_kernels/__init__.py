"""Upstream's names of kernels of the gated delta rule; what they run is flashinfer.gdn_decode's."""

from . import gdn_decode_bf16_state as gdn_decode_bf16_state
