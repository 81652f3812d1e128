"""Attention whose matrix of logits is sparse in blocks."""

from ._attention.functions.bsr_mask import convert_bsr_mask_layout
from ._attention.wrappers.block_sparse import BlockSparseAttentionWrapper
from ._attention.wrappers.variable_block_sparse import VariableBlockSparseAttentionWrapper

__all__ = [
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "convert_bsr_mask_layout",
]
