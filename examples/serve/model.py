"""The forward pass of Llama, Mistral, Qwen2 and Qwen3: matrix products and `flashinfer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

import flashinfer

from .config import ModelConfig
from .invariance import in_tiles, padded, round_up
from .rope import rope_cache

if TYPE_CHECKING:
    from .parallel import TensorParallel


@dataclass
class Batch:
    """What the layers of one step share, all on the device.

    Attributes
    ----------
    tokens : torch.Tensor
        ``[nnz]`` int32: the new tokens of all requests, one request after the other.
    batch_indices, positions : torch.Tensor
        ``[nnz]`` int32: request of each token (-1: padding) and its position in that request.
    rotations : torch.Tensor
        ``[nnz]`` int32: row of each token in the cosines and sines; `positions` itself for models
        that have no other frequencies for long texts.
    kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        Page table, int32, as in `flashinfer.append_paged_kv_cache`.
    attention : dict
        A planned wrapper for each window of the model's layers.
    attended : int
        Rows that attention computes; rows beyond are padding.
    tile : int or None
        Rows of a tile: see `in_tiles`.
    """

    tokens: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    rotations: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    attention: dict[int, Any]
    attended: int
    tile: int | None = None


@dataclass
class _Layer:
    """Weights of a layer; products of the same input are one product. Biases may be None.

    Matrices are ``[inputs, outputs]``, the other way round than in checkpoints: for few rows cuBLAS
    has faster kernels for these (docs/tuning/serving_step.md).
    """

    window: int
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Model:
    """Weights on a device, and the forward pass.

    Parameters
    ----------
    config : ModelConfig
        Shapes.
    tensors : dict
        Tensors of a checkpoint by name; emptied, so that memory is freed while layers are fused.
    device : str or torch.device
        Where they are.
    dtype : torch.dtype
        float16 or bfloat16.
    parallel : TensorParallel, optional
        The ranks that divide the model; each gives the whole checkpoint. `config` is then that of
        this rank's part.

    Raises
    ------
    ValueError
        If a tensor is missing or left over, has another shape, or `dtype` is another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, torch.Tensor],
        device: str | torch.device,
        dtype: torch.dtype,
        parallel: TensorParallel | None = None,
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"`dtype` must be torch.float16 or torch.bfloat16, got {dtype}")
        self._add_norm: Callable[..., None] = flashinfer.fused_add_rmsnorm
        if parallel is not None:
            config = parallel.part_of(config)
            parallel.divide(tensors)
            parallel.open(config.hidden_size, dtype)
            self._add_norm = parallel.add_norm
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        take = _Taker(tensors)
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.embedding = take("model.embed_tokens.weight", vocabulary, hidden)
        self.layers = [_read_layer(config, take, number) for number in range(config.num_layers)]
        self.norm = take("model.norm.weight", hidden)
        # Some files repeat a tied matrix; it is the embedding's.
        head = take.optional("lm_head.weight", vocabulary, hidden)
        if config.tied_embeddings:
            self.head = self.embedding.t()
        elif head is not None:
            self.head = head.t().contiguous()
        else:
            raise ValueError("the checkpoint must have 'lm_head.weight', it has not")
        take.finish()
        self.cos_sin = rope_cache(config.rope, config.head_dim, config.max_positions).to(device)

    def forward(self, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Append the keys and values of a batch to the cache.

        Parameters
        ----------
        batch : Batch
            The new tokens.
        cache : torch.Tensor
            ``[layers, pages, 2, page_size, num_kv_heads, head_dim]``.

        Returns
        -------
        torch.Tensor
            ``[nnz, hidden_size]``, normalised: see `logits`.
        """
        eps = self.config.rms_norm_eps
        residual = embedding(batch.tokens, self.embedding)
        norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]

        def begin(residual: torch.Tensor) -> torch.Tensor:
            return flashinfer.rmsnorm(residual, self.layers[0].input_norm, eps)

        x = in_tiles(batch.tile, begin, residual)
        for layer, norm, pages in zip(self.layers, norms, cache, strict=True):
            q, k, v = in_tiles(batch.tile, partial(self._project, layer), x, batch.rotations)
            out = self._attend(layer, q, k, v, batch, pages)
            x = in_tiles(batch.tile, partial(self._mix, layer, norm), out, residual)
        return x

    def logits(self, x: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """``[rows, vocab_size]`` float32 of rows of `forward`; `tile`: see `in_tiles`."""
        whole = padded(x, round_up(len(x), tile))
        return in_tiles(tile, lambda rows: (rows @ self.head).float(), whole)[: len(x)]

    def _project(
        self, layer: _Layer, x: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of normalised rows."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = _product(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = flashinfer.rmsnorm(q, layer.q_norm, config.rms_norm_eps)
            k = flashinfer.rmsnorm(k, layer.k_norm, config.rms_norm_eps)
        flashinfer.apply_rope_with_cos_sin_cache_inplace(
            rotations, q, k, dim, self.cos_sin, is_neox=True
        )
        return q, k, v

    def _attend(
        self,
        layer: _Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        flashinfer.append_paged_kv_cache(
            _as_cached(k, cache.dtype),
            _as_cached(v, cache.dtype),
            batch.batch_indices,
            batch.positions,
            cache,
            batch.kv_indices,
            batch.kv_indptr,
            batch.kv_last_page_len,
        )
        out = batch.attention[layer.window].run(q[: batch.attended], cache)
        return padded(out.flatten(1), len(q))

    def _mix(
        self, layer: _Layer, norm: torch.Tensor, out: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """What follows attention; `residual` is updated in place."""
        eps = self.config.rms_norm_eps
        x = _product(out, layer.o, layer.o_bias)
        # In place: residual += x, x = norm(residual).
        self._add_norm(x, residual, layer.mlp_norm, eps)
        x = flashinfer.silu_and_mul(_product(x, layer.gate_up, layer.gate_up_bias))
        x = _product(x, layer.down, layer.down_bias)
        self._add_norm(x, residual, norm, eps)
        return x


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _as_cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values as the cache has them; 8-bit ones saturate, a cast alone would give NaN."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


class _Taker:
    """Takes tensors out of a checkpoint, checking their shapes, until none is left."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def optional(self, name: str, *shape: int) -> torch.Tensor | None:
        tensor = self._tensors.pop(name, None)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name!r} must have shape {shape}, got {tuple(tensor.shape)}")
        return tensor

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.optional(name, *shape)
        if tensor is None:
            raise ValueError(f"the checkpoint must have {name!r}, it has not")
        return tensor

    def finish(self) -> None:
        # Frequencies that old checkpoints carry along; they follow from the configuration.
        left = sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(f"the checkpoint has tensors that nothing here uses: {left[:5]}")


def _read_layer(config: ModelConfig, take: _Taker, number: int) -> _Layer:
    at = f"model.layers.{number}."
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim

    def fused(
        parts: tuple[tuple[str, int], ...], columns: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights = [take(f"{at}{name}.weight", rows, columns) for name, rows in parts]
        biases = [take.optional(f"{at}{name}.bias", rows) for name, rows in parts]
        have = [bias for bias in biases if bias is not None]
        if have and len(have) != len(parts):
            raise ValueError(f"{at}: all or none of {[n for n, _ in parts]} must have a bias")
        return torch.cat(weights).t().contiguous(), torch.cat(have) if have else None

    qkv, qkv_bias = fused(
        (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)), hidden
    )
    o, o_bias = fused((("self_attn.o_proj", hidden),), q)
    gate_up, gate_up_bias = fused((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden)
    down, down_bias = fused((("mlp.down_proj", hidden),), inner)
    return _Layer(
        window=config.windows[number],
        input_norm=take(f"{at}input_layernorm.weight", hidden),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=take.optional(f"{at}self_attn.q_norm.weight", dim),
        k_norm=take.optional(f"{at}self_attn.k_norm.weight", dim),
        o=o,
        o_bias=o_bias,
        mlp_norm=take(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )
