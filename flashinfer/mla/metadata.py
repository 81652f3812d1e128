"""Value types of the MLA interface: sizes of heads and layers, and index tensors of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Sizes of one attention head of a model with latent attention.

    Attributes
    ----------
    qk_nope_head_dim : int
        Part of a query and of a key without rotary embedding.
    qk_rope_head_dim : int
        Part with it, which all heads' keys share.
    v_head_dim : int
        Columns of a value.
    kv_lora_rank : int
        Columns of the latent vector that keys and values are made from.
    """

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """Sizes of one layer's attention.

    Attributes
    ----------
    head_dimensions : MLAHeadDimensions
        Dimensions of each head.
    num_heads : int
        Query heads of the layer on this GPU.
    """

    head_dimensions: MLAHeadDimensions
    num_heads: int


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Index tensors that ``plan`` takes, in one or in both of two forms.

    Attributes
    ----------
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : torch.Tensor or None
        Pages as a list of page numbers; see ``BatchMLAPagedAttentionWrapper.plan``.
    cum_seq_lens_q, block_tables, seq_lens : torch.Tensor or None
        Pages as a table with a row per request.
    max_q_len : int or None
        Most query tokens of a request.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        """Pages as a list of page numbers."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Pages as a table with a row per request."""
        return cls(
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
        )

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Both forms of the same batch; the list is what is used."""
        return cls(
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            cum_seq_lens_q,
            block_tables,
            seq_lens,
            max_q_len,
        )
