"""Random weights stand for the tensors that a checkpoint of the model would have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from examples.serve import decode_step
from examples.serve.config import ModelConfig
from examples.serve.model import Model
from examples.serve.plot import write_plot
from examples.serve.shapes import SHAPES, RandomWeights, random_model
from tests.serve.models import ARCHITECTURES, write

SMALL = ("mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", [*SMALL, "qwen3_next", "gemma2"])
def test_tensors_are_those_of_a_checkpoint(name: str, tmp_path: Path):
    folder = write(tmp_path, name)
    stored: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            stored |= {n: tuple(content.get_slice(n).get_shape()) for n in content.keys()}  # noqa: SIM118
    config = ModelConfig.from_folder(folder)
    weights = RandomWeights(config, "meta")
    Model(config, weights, "meta", torch.bfloat16)
    if config.tied_embeddings:
        stored.pop("lm_head.weight", None)
    assert weights.shapes == stored


# Parameters of the models as they are published, in billions; of the cut ones, of the layers left.
PARAMETERS = {"llama-8b": 8.03, "qwen3-30b-a3b": 30.5}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str):
    config = ModelConfig.from_dict(SHAPES[name])
    weights = RandomWeights(config, "meta")
    model = Model(config, weights, "meta", torch.bfloat16)
    count = sum(map(math.prod, weights.shapes.values())) / 1e9
    if name in PARAMETERS:
        assert count == pytest.approx(PARAMETERS[name], rel=0.005)
    one, many, all_of_it = (decode_step.weight_bytes(model, rows) for rows in (1, 64, None))
    assert one <= many <= all_of_it
    has_experts = not name.startswith("llama")
    assert (one < all_of_it / 2) == has_experts


def test_experts_that_a_token_chooses_are_counted():
    """One token of a mixture reads its share of the experts, and all of the rest."""
    config = ModelConfig.from_dict(SHAPES["qwen3-30b-a3b"])
    model = Model(config, RandomWeights(config, "meta"), "meta", torch.bfloat16)
    experts = 48 * 128 * 3 * 768 * 2048 * 2
    rest = decode_step.weight_bytes(model) - experts
    assert decode_step.weight_bytes(model, 1) == rest + experts * 8 // 128


def test_states_are_counted():
    config = ModelConfig.from_dict(SHAPES["qwen3-next-cut"])
    model = Model(config, RandomWeights(config, "meta"), "meta", torch.bfloat16)
    matrices, convolution = 32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert decode_step.state_bytes(model) == 12 * (matrices + convolution)


def test_a_random_model_computes(tmp_path: Path):
    folder = write(tmp_path, "qwen3")
    model = random_model(ModelConfig.from_folder(folder), "cpu")
    assert torch.isfinite(model.logits(model.embedding[:3])).all()
    again = random_model(ModelConfig.from_folder(folder), "cpu")
    assert torch.equal(model.head, again.head) and "qwen3" in ARCHITECTURES


def test_plot(tmp_path: Path):
    span = decode_step.Span
    spans = [span("nvjet", 0.0, 500.0), span("flashinfer::norm_kernel", 500.0, 600.0)]
    parts = {"norm_kernel": decode_step.LAYER}
    step = decode_step.DecodeStep([0.5, 0.6], [10], 10**6, 10**6, spans, parts)
    write_plot(step, "a model", tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert text.startswith("<?xml") and "</svg>" in text
    step.spans.clear()
    with pytest.raises(ValueError, match="`step` must have recorded kernels"):
        write_plot(step, "a model", tmp_path / "none.svg")


def test_experts_that_a_step_chose_are_counted():
    """Rows that a graph has beside the tokens of the step do not count."""
    config = ModelConfig.from_dict(SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 1})
    model = Model(config, RandomWeights(config, "meta"), "meta", torch.bfloat16)
    rows = [range(8), [7, 0, 1, 2, 3, 4, 5, 99], range(8, 16), range(9, 17)]
    chosen = torch.tensor([list(row) for row in rows])
    mixture = model.blocks[1].body
    logits = torch.zeros(4, 128).scatter_(1, chosen, 1.0 - 0.01 * torch.arange(8).expand(4, 8))
    mixture.router.gate = lambda x: logits[: len(x)]
    mixture.router.gate.inputs = 2048
    every, expert = decode_step.weight_bytes(model), 3 * 768 * 2048 * 2
    decode_step.note_routes(model)
    assert decode_step.weight_bytes(model, 1) == every - 120 * expert  # as expected by chance
    mixture.router.gate(torch.zeros(4, 2048))
    mixture.router.gate(torch.zeros(1, 2048))
    assert decode_step.weight_bytes(model, 2) == every - (128 - 9) * expert
    assert decode_step.weight_bytes(model) == every
