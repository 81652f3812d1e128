"""Tokens of checkpoints of 8 and 4 bits, against plain PyTorch on the numbers they stand for."""

from __future__ import annotations

import random
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
from tests.serve.packing import E4M3, FORMATS, fp8_tensor, pack_products, packed_mixture

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
PROMPT = random.Random(0).choices(range(256), k=16)


def rounding_of(
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
    numbers = pack_products(tmp_path, pack, config)
    exact = PlainModel(ModelConfig.from_dict(SHAPE), numbers)
    model, _ = load(tmp_path, DEVICE)
    products = [p for block in model.blocks for p in vars(block.body).values()]
    products = [p for product in products for p in getattr(product, "parts", [product])]
    kinds = {type(p) for p in products} & {Fp8Rows, Fp8Blocks, Int4Groups, Linear, Joined}
    assert kinds == {kind}
    rounding = rounding_of(monkeypatch, exact, kind)
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
    folder, reference = packed_mixture(tmp_path, name)
    exact = reference.logits(PROMPT)
    model, _ = load(folder, DEVICE)
    runner = Runner(model, 8, 16, model.dtype, 2, False)
    with runner.backend():
        got = runner.run([Chunk(PROMPT, 0, [5, 2])])[0].cpu()
    error = (got - exact[-1]).square().mean().sqrt() / exact[-1].std()
    assert error < (0.15 if name == "fp8-block" else 0.02), error
    assert model.blocks[1].body.experts.options["quant_scales"], "experts were widened"


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
    pack_products(tmp_path, fp8_tensor, {"quant_method": "fp8"})
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


@pytest.mark.parametrize(("outputs", "takes"), [(2048, True), (6144, False), (28672, False)])
def test_large_weights_multiply_single_rows_without_their_norm(
    monkeypatch: pytest.MonkeyPatch, outputs: int, takes: bool
) -> None:
    """The kernel of several rows, which is faster then, has no norm before it."""
    monkeypatch.setattr("examples.serve.layers.linear.is_hopper", lambda device: True)
    weight = torch.empty(4096, outputs, dtype=torch.bfloat16, device="meta")
    assert Linear(weight).takes_sums == takes
