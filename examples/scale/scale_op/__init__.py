"""An op of your own on FlashInfer's JIT: `scale(x, factor)`."""

from .scale import scale as scale
