"""Checkpoints of 8 and 4 bits, and the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from examples.serve.layers.linear import Fp8Blocks, Fp8Rows, Int4Groups
from tests.serve.models import Reference, write

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A matrix to tensors by suffix, and the numbers they stand for."""


def fp8_tensor(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = w.abs().max() / 448
    codes = (w / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_static(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, numbers = fp8_tensor(w)
    return tensors | {"input_scale": torch.tensor([16 / 448])}, numbers


def fp8_channel(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = w.abs().amax(1, keepdim=True) / 448
    codes = (w / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_block(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, codes = torch.empty_like(w), torch.empty(w.shape, dtype=E4M3)
    scales = torch.empty(-(-w.shape[0] // 128), -(-w.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = w[part].abs().max() / 448
            codes[part] = (w[part] / scales[i, j]).to(E4M3)
            numbers[part] = codes[part].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, numbers


def _groups(
    w: torch.Tensor, size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0 to 15, zeros and scales by group of columns, and the numbers."""
    grouped = w.unflatten(1, (-1, size))
    low, high = grouped.amin(2), grouped.amax(2)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / 15).half()
    zeros = torch.full_like(low, 8) if symmetric else (-low / scales.float()).round()
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    numbers = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1).int(), zeros.int(), scales, numbers.flatten(1)


def _words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32, eight codes of a row each; `order` says which code lies in which four bits."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, number in enumerate(order):
        words |= codes[:, number::8].long() << (4 * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq(w: torch.Tensor, size: int = 32, symmetric: bool = True, shuffled: bool = False):
    order = torch.randperm(w.shape[1]) if shuffled else torch.arange(w.shape[1])
    codes, zeros, scales, numbers = _groups(w[:, order], size, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": _words(codes[:, back]).t().contiguous(),
        "qzeros": _words((zeros - 1).t() & 15),
        "scales": scales.t().contiguous(),
        "g_idx": (back // size).int(),
    }
    return tensors, numbers[:, back]


def awq(w: torch.Tensor):
    codes, zeros, scales, numbers = _groups(w, 64, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _words(codes.t(), order),
        "qzeros": _words(zeros.t(), order),
        "scales": scales.t().contiguous(),
    }
    return tensors, numbers


def _gptq(group: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group}


FORMATS: dict[str, tuple[Pack, dict[str, Any], type | None]] = {
    "fp8-tensor": (fp8_tensor, {"quant_method": "fp8"}, Fp8Rows),
    "fp8-static": (fp8_static, {"quant_method": "fp8"}, Fp8Rows),
    "fp8-channel": (
        fp8_channel, {"quant_method": "compressed-tensors", "format": "float-quantized"}, Fp8Rows,
    ),
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8Blocks),
    "gptq": (gptq, _gptq(32), Int4Groups),
    "gptq-zeros": (lambda w: gptq(w, 64, False), _gptq(64), Int4Groups),
    "gptq-order": (lambda w: gptq(w, 32, True, True), _gptq(32), Int4Groups),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64}, Int4Groups),
}  # fmt: skip


def pack_products(
    folder: Path, pack: Pack, config: dict[str, Any], names: str = "_proj.weight"
) -> Tensors:
    """Store the products' weights of a checkpoint so; the numbers of all its tensors."""
    path = folder / "model.safetensors"
    stored, numbers = {}, {}
    for name, tensor in sorted(load_file(path).items()):
        if name.endswith(names):
            # Rows and groups of columns of several sizes: scales in a wrong place would show.
            w = tensor.float() * torch.logspace(-0.3, 0.3, len(tensor))[:, None]
            w *= torch.logspace(0.3, -0.3, w.shape[1])
            parts, numbers[name] = pack(w)
            stored |= {name.removesuffix("weight") + kind: t for kind, t in parts.items()}
        else:
            stored[name], numbers[name] = tensor, tensor.float()
    save_file({k: v.contiguous() for k, v in stored.items()}, path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return numbers


def packed_mixture(folder: Path, name: str, **changes: Any) -> tuple[Path, Reference]:
    """A mixture in a format, and the same one with the numbers that it stands for."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    kind = "gpt_oss" if name == "mxfp4" else "qwen3_moe"
    if name == "mxfp4":
        wide |= {"intermediate_size": 64, "layer_types": ["full_attention"]}
    else:
        wide |= {"mlp_only_layers": [], "head_dim": 32}
    wide |= changes
    write(folder / "dense", kind, **wide)
    tensors = _one_file(folder / "dense")
    (folder / "packed").mkdir()
    for file in (folder / "dense").iterdir():
        if file.suffix == ".json":
            (folder / "packed" / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "packed" / "model.safetensors")
    if name == "mxfp4":
        numbers = _pack_mxfp4(folder / "packed")
    else:
        pack, config, _ = FORMATS[name]
        numbers = pack_products(folder / "packed", pack, config, "_proj.weight")
    save_file({k: v.contiguous() for k, v in numbers.items()}, folder / "dense/model.safetensors")
    return folder / "packed", Reference(folder / "dense")


def _one_file(folder: Path) -> Tensors:
    """Tensors of all files, which are removed."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors*")):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        file.unlink()
    return tensors


def _pack_mxfp4(folder: Path) -> Tensors:
    """Experts as gpt-oss has them: e2m1 with a power of two for 32 elements along the input."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    stored, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name], numbers[name] = tensor, tensor.float()
        if name.endswith(("gate_up_proj", "down_proj")):
            del stored[name]
            groups = tensor.float().mT.unflatten(2, (-1, 32))
            exponent = (groups.abs().amax(-1) / 4).log2().ceil()
            scaled = groups / exponent.exp2()[..., None]
            codes = (scaled[..., None] - values).abs().argmin(-1)
            low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
            stored[f"{name}_blocks"] = (low | (high << 4)).to(torch.uint8)
            stored[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
            numbers[name] = (values[codes] * exponent.exp2()[..., None]).flatten(2).mT
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return numbers
