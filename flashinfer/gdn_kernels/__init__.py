"""Upstream's names of kernels of the gated delta rule; what they run is flashinfer.gdn_decode's."""
