"""Tokens of checkpoints of 8 and 4 bits, against plain PyTorch on the numbers they stand for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from examples.serve import plain
from examples.serve.checkpoint import SMALL, load, write_random_checkpoint
from examples.serve.config import ModelConfig
from examples.serve.engine import Engine, SamplingParams
from examples.serve.layers.linear import Fp8Blocks, Fp8Rows, Int4Groups, Joined, Linear
from examples.serve.plain import PlainModel
from examples.serve.runner import Chunk, Runner
from tests.serve.models import Reference, write

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {
    **SMALL,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}
E4M3 = torch.float8_e4m3fn
PROMPT = random.Random(0).choices(range(256), k=16)
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


def _pack(folder: Path, pack: Pack, config: dict[str, Any], names: str = "_proj.weight") -> Tensors:
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


def _rounding(
    monkeypatch: pytest.MonkeyPatch, model: PlainModel, kind: type | None
) -> torch.Tensor:
    """Errors by rounding the activations of products, times 2."""
    exact = model(PROMPT)

    def rounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if kind is Int4Groups or len(w) == SHAPE["vocab_size"]:
            return linear(x.bfloat16().float(), w).bfloat16().float()
        size = 128 if kind is Fp8Blocks else x.shape[-1]
        grouped = x.unflatten(-1, (-1, size))
        scale = grouped.abs().amax(-1, keepdim=True) / 448
        return (
            linear(((grouped / scale).to(E4M3).float() * scale).flatten(-2), w).bfloat16().float()
        )

    with monkeypatch.context() as patch:
        patch.setattr(plain, "linear", rounded)
        patch.setattr(plain, "rms_norm", lambda *a: torch.rms_norm(*a).bfloat16().float())
        return 2 * (model(PROMPT) - exact)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    pack, config, kind = FORMATS[name]
    torch.manual_seed(0)
    write_random_checkpoint(tmp_path, SHAPE)
    numbers = _pack(tmp_path, pack, config)
    exact = PlainModel(ModelConfig.from_dict(SHAPE), numbers)
    model, _ = load(tmp_path, DEVICE)
    products = [p for block in model.blocks for p in vars(block.body).values()]
    products = [p for product in products for p in getattr(product, "parts", [product])]
    kinds = {type(p) for p in products} & {Fp8Rows, Fp8Blocks, Int4Groups, Linear, Joined}
    assert kinds == {kind}
    rounding = _rounding(monkeypatch, exact, kind)
    bound = float(rounding.abs().max())
    engine = Engine(model, None, num_pages=8, max_batch_tokens=64)
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    tokens = list(PROMPT)
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    logits = exact(tokens[:-1])[len(PROMPT) - 1 :]
    assert bound < float(logits.std())
    behind = logits.amax(1) - logits.gather(1, torch.tensor(tokens[len(PROMPT) :])[:, None])[:, 0]
    assert behind.max() <= 2 * bound
    runner = Runner(model, 8, 16, model.dtype, 2, False)
    with runner.backend():
        got = runner.run([Chunk(PROMPT, 0, [5, 2])])[0].cpu()
    error = got - exact(PROMPT)[-1]
    assert error.abs().max() <= bound and error.square().mean() <= rounding.square().mean()


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", ["mxfp4", "fp8-block", "gptq"])
def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Mixtures of 4 and 8 bits: gpt-oss as it is published, Qwen3-MoE."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    kind = "gpt_oss" if name == "mxfp4" else "qwen3_moe"
    if name == "mxfp4":
        wide |= {"intermediate_size": 64, "layer_types": ["full_attention"]}
    else:
        wide |= {"mlp_only_layers": [], "head_dim": 32}
    write(tmp_path / "dense", kind, **wide)
    tensors = _one_file(tmp_path / "dense")
    (tmp_path / "packed").mkdir()
    for file in (tmp_path / "dense").iterdir():
        if file.suffix == ".json":
            (tmp_path / "packed" / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    if name == "mxfp4":
        numbers = _pack_mxfp4(tmp_path / "packed")
    else:
        pack, config, _ = FORMATS[name]
        numbers = _pack(tmp_path / "packed", pack, config, "_proj.weight")
    save_file({k: v.contiguous() for k, v in numbers.items()}, tmp_path / "dense/model.safetensors")
    exact = Reference(tmp_path / "dense").logits(PROMPT)
    model, _ = load(tmp_path / "packed", DEVICE)
    runner = Runner(model, 8, 16, model.dtype, 2, False)
    with runner.backend():
        got = runner.run([Chunk(PROMPT, 0, [5, 2])])[0].cpu()
    error = (got - exact[-1]).square().mean().sqrt() / exact[-1].std()
    assert error < (0.15 if name == "fp8-block" else 0.02), error
    assert model.blocks[1].body.experts.options["quant_scales"], "experts were widened"


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


def test_calibrated_scales_of_an_8_bit_cache(tmp_path: Path):
    """Keys and values that are far beyond 448 without their scales."""
    write_random_checkpoint(tmp_path, SHAPE)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        for part, factor in (("q", 1 / 512), ("k", 512.0), ("v", 4096.0), ("o", 1 / 4096)):
            if name.endswith(f"self_attn.{part}_proj.weight"):
                tensor *= factor
    exact = PlainModel(ModelConfig.from_dict(SHAPE), tensors)(PROMPT)[-1]
    errors = []
    for scaled in (False, True):
        if scaled:
            for layer in range(SHAPE["num_hidden_layers"]):
                tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(16.0)
                tensors[f"model.layers.{layer}.self_attn.v_proj.output_scale"] = torch.tensor(
                    [64.0]
                )
        save_file(tensors, path)
        model, _ = load(tmp_path, DEVICE)
        runner = Runner(model, 8, 16, E4M3, 2, False)
        with runner.backend():
            got = runner.run([Chunk(PROMPT, 0, [5, 2])])[0].cpu()
        errors.append(float((got - exact).square().mean().sqrt() / exact.std()))
    assert errors[0] > 0.5 and errors[1] < 0.1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"_scale": None}, "must have 'model.layers.0.mlp.down_proj.weight_scale', it has not"),
        ({"_zero_point": torch.zeros(128)}, "nothing here uses: .*down_proj.weight_zero_point"),
        ({"_scale": torch.ones(7)}, "down_proj.weight_scale' must have 1 or 128 numbers, got 7"),
        ({"": torch.zeros(128, 8).to(E4M3)}, r"down_proj.weight' must have shape \(128, 256\)"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str):
    write_random_checkpoint(tmp_path, SHAPE)
    _pack(tmp_path, fp8_tensor, {"quant_method": "fp8"})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for end, tensor in changes.items():
        name = f"model.layers.0.mlp.down_proj.weight{end}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "cpu")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "bitsandbytes"}, "`quant_method` of fp8.*got 'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "`weight_block_size`.*64, 64"),
        ({"quant_method": "gptq", "bits": 8}, "`bits` of gptq must be 4, got 8"),
        ({"quant_method": "awq", "version": "gemv"}, "`version` of awq.*'gemv'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "`format` of compressed-tensors.*'pack-quantized'",
        ),
    ],
)
def test_formats_that_are_not_implemented(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**SHAPE, "quantization_config": config})
