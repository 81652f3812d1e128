"""What a server says about itself when it starts."""

from __future__ import annotations

from typing import Any

import torch

from . import kernels
from .model import Model


def describe(
    name: str, model: Model, cache: torch.Tensor, page_size: int, options: dict[str, Any]
) -> list[str]:
    """Lines for the log.

    Parameters
    ----------
    name : str
        Name of the model.
    model : Model
        The model that is served.
    cache : torch.Tensor
        The KV cache, ``[layers, pages, ...]``.
    page_size : int
        Tokens of a page.
    options : dict
        Names and values of the engine's options.
    """
    config = model.config
    pages = cache.shape[1]
    capacity = pages * page_size
    kv_dtype, dtype = (str(t).removeprefix("torch.") for t in (cache.dtype, model.dtype))
    return [
        f"{kernels.describe()}, PyTorch {torch.__version__}, {_device(model)}",
        f"Model {name!r}: {config.architecture}, {config.num_layers} layers, "
        f"vocabulary of {config.vocab_size:,}, {dtype}",
        f"Context: {min(config.max_positions, capacity + 1):,} tokens"
        + (
            f" (the model has {config.max_positions:,}, the KV cache room for less)"
            if config.max_positions > capacity + 1
            else ""
        ),
        f"KV cache: {pages:,} pages of {page_size} tokens, {capacity:,} tokens in all, "
        f"{cache.nbytes / 1e9:.2f} GB of {kv_dtype}",
        "Options: " + ", ".join(f"{key} {value}" for key, value in options.items()),
    ]


def _device(model: Model) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return "CPU (the reference backend)"
