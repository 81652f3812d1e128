"""Reads and writes models in Hugging Face's format."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import ModelConfig
from .model import Model
from .tokens import (
    BYTE_LEVEL_EOS,
    BYTE_LEVEL_FILE,
    BYTE_LEVEL_VOCABULARY,
    Tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    from .parallel import Parallel

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": BYTE_LEVEL_VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,  # as large models have: the same attention modules
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": BYTE_LEVEL_EOS,
}
"""Configuration of the checkpoint that stands in where none is given."""

LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "eos_token_id": [128001, 128008, 128009],
}
"""Configuration of Llama 3.1 with 8 billion parameters, for measurements with random weights."""


_KEPT = (
    *("A_log", "dt_bias", ".D", ".sinks", "e_score_correction_bias"),
    *("_scale", "_scale_inv", ".scales"),
)


def load(
    path: str | Path | None,
    device: str | torch.device,
    dtype: torch.dtype = torch.bfloat16,
    parallel: Parallel | None = None,
) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer.

    Parameters
    ----------
    path : path, optional
        Folder with ``config.json``, ``*.safetensors`` and a tokenizer. None writes a small model of
        random weights into a temporary folder and loads that.
    device : str or torch.device
        ``"cuda"`` (or with an index), or ``"cpu"`` for the reference backend.
    dtype : torch.dtype
        Type of weights and activations, bfloat16 or float16.
    parallel : Parallel, optional
        The ranks that divide the model.

    Raises
    ------
    ValueError
        If something is missing in the folder, or not implemented here, or left over: a tensor that
        the model does not use would change the result.
    """
    _check_device(device)
    if path is None:
        with tempfile.TemporaryDirectory() as temporary:
            return load(write_random_checkpoint(temporary), device, dtype, parallel)
    folder = Path(path)
    config = ModelConfig.from_folder(folder)
    model = Model(config, TensorFiles(folder, device, dtype), device, dtype, parallel)
    return model, load_tokenizer(folder)


def _check_device(device: str | torch.device) -> None:
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be 'cpu', 'cuda' or 'cuda:<number>', got {str(device)!r}")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ValueError(
                f"`device` must be 'cpu' or one of the {count} GPUs that torch {torch.__version__} "
                f"sees, got {str(device)!r}"
            )


class TensorFiles(MutableMapping[str, torch.Tensor]):
    """Every tensor of every ``*.safetensors`` file, by name; what has 16 bits or more as `dtype`.

    A tensor is read when it is asked for, so that a rank that has a part of a model needs memory
    for one whole tensor at a time. Numbers that are not the sides of a product keep their type:
    some count in float32.
    """

    def __init__(self, folder: Path, device: str | torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"`model` must have *.safetensors files, got {str(folder)!r}")
        for file in files:
            try:
                content: Any = safe_open(file, framework="pt", device=str(device))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} must be a safetensors file: {error}") from error
            self._files |= dict.fromkeys(content.keys(), content)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._files[name].get_tensor(name)
        converts = tensor.is_floating_point() and tensor.itemsize > 1
        return tensor.to(self._dtype) if converts and not name.endswith(_KEPT) else tensor

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        raise TypeError("files are only read")

    def __delitem__(self, name: str) -> None:
        del self._files[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_random_checkpoint(
    folder: str | Path, config: Mapping[str, Any] = SMALL, seed: int = 0
) -> Path:
    """Write a model of random bfloat16 weights with the byte-level tokenizer.

    Parameters
    ----------
    folder : path
        Where; made if need be.
    config : mapping
        Content of ``config.json``, of a model that `Model` can load; biases are those that its
        architecture has.
    seed : int
        Seed of the random weights.

    Returns
    -------
    Path
        `folder`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    (folder / BYTE_LEVEL_FILE).write_text(json.dumps({"eos": BYTE_LEVEL_EOS}))
    tensors = random_tensors(ModelConfig.from_dict(config), seed=seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_tensors(
    config: ModelConfig, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint with random bfloat16 values, by name, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config).items():
        values = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 1:
            values.mul_(0.1).add_(1)  # norms scale by about 1
        else:
            values.mul_(shape[-1] ** -0.5)  # products keep the variance of their input
        tensors[name] = values.bfloat16()
    return tensors


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors."""
    hidden, inner, dim = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_heads * dim, c.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for layer in range(c.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (q, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, q),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
        if c.architecture == "Qwen2ForCausalLM":
            shapes |= {f"{at}self_attn.{name}_proj.bias": (n,) for name, n in _qkv(q, kv)}
        if c.architecture == "Qwen3ForCausalLM":
            shapes |= {f"{at}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    shapes["model.norm.weight"] = (hidden,)
    if not c.tied_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes


def _qkv(q: int, kv: int) -> tuple[tuple[str, int], ...]:
    return ("q", q), ("k", kv), ("v", kv)
