"""The older path of `flashinfer.quantization.fp8_quantization`."""

from .quantization.fp8_quantization import *  # noqa: F403
