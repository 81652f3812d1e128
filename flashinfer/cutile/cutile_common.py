"""The same question under the name of the module in which FlashInfer has it."""

from .._common.cuda_tile import is_cuda_tile_available as is_cuda_tile_available
