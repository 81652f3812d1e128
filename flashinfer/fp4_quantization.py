"""The older path of `flashinfer.quantization.fp4_quantization`."""

from .quantization.fp4_quantization import *  # noqa: F403
