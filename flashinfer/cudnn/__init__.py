"""Batches of attention with the arguments of FlashInfer's cuDNN functions; the kernels are ours."""

from .decode import cudnn_batch_decode_with_kv_cache
from .prefill import cudnn_batch_prefill_with_kv_cache

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]
