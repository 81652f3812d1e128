"""``cudnn_batch_decode_with_kv_cache`` under the module that FlashInfer has it in."""

from .._attention.functions.cudnn import cudnn_batch_decode_with_kv_cache

__all__ = ["cudnn_batch_decode_with_kv_cache"]
