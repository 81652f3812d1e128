"""Scaled RoPE of checkpoints: angles and logits of `transformers`, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.serve.checkpoint import SMALL, load
from examples.serve.config import ModelConfig
from examples.serve.engine import Engine, SamplingParams
from examples.serve.rope import rope_cache
from tests.serve.models import ARCHITECTURES, LONGROPE, SHAPE, Reference, write

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {**YARN, "original_max_position_embeddings": 128},
    "yarn without original length": YARN,
    "yarn without factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": None,
        "original_max_position_embeddings": 64,
    },
    "yarn, other ramp": {
        **YARN,
        "original_max_position_embeddings": 100,
        "beta_fast": 8,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn, a step": {**YARN, "original_max_position_embeddings": 2, "beta_fast": 9, "beta_slow": 8},
    "yarn, attention factor": {
        **YARN,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.7,
    },
    "yarn, mscale": {
        **YARN,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 32.0},
    "longrope, attention factor": {**LONGROPE, "factor": 4.0, "attention_factor": 1.5},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_angles(name: str):
    """Angles of all positions, for texts of the original length and of the longest."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = SCALINGS[name]
    theirs = transformers.AutoConfig.for_model("llama", **SHAPE, rope_parameters=dict(rope))
    values = {**theirs.to_dict(), "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    config = ModelConfig.from_dict(values)
    longest = SHAPE["max_position_embeddings"]
    assert config.max_positions >= longest
    cache = rope_cache(config.rope, config.head_dim, config.max_positions)
    trained = rope.get("original_max_position_embeddings", longest)
    for length in (trained, longest):
        embedding = LlamaRotaryEmbedding(theirs)
        cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
        start = config.rotation(length)
        half = config.head_dim // 2
        expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)
        # Their angles are float32: up to 512 radians, rounded to 2^-16 of them.
        torch.testing.assert_close(cache[start : start + length], expected, rtol=0, atol=1e-4)
    assert (len(cache) > config.max_positions) == name.startswith("longrope")


def test_yarn_extends_the_context():
    """Whether `max_position_embeddings` is the original length, as in Qwen's files, or not."""
    rope = {**YARN, "original_max_position_embeddings": 512}
    config = ModelConfig.from_dict(
        {**SMALL, "max_position_embeddings": 512, "rope_parameters": rope}
    )
    assert config.max_positions == 2048
    longer = ModelConfig.from_dict(
        {**SMALL, "max_position_embeddings": 4096, "rope_parameters": rope}
    )
    assert longer.max_positions == 4096


@pytest.mark.parametrize("use_graph", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_text_that_becomes_long(tmp_path: Path, use_graph: bool):
    """Across the length at which frequencies change, beside texts that stay short or are long.

    Each token is the best of `transformers` for the whole text before it, computed anew.
    """
    pytest.importorskip("transformers")
    folder = write(tmp_path, "longrope")
    reference = Reference(folder)
    engine = Engine(
        *load(folder, DEVICE, torch.float16),
        num_pages=64,
        page_size=4,
        max_batch_size=4,
        max_batch_tokens=24,
        use_cuda_graph=use_graph,
    )
    trained = LONGROPE["original_max_position_embeddings"]
    rng = random.Random(0)
    common = rng.choices(range(256), k=trained + 20)
    # One beginning for all: pages of other frequencies must not be shared.
    prompts = {"short": common[:20], "becomes": common[: trained - 5], "long": common}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    after: dict[tuple[int, ...], torch.Tensor] = {}  # logits; both rounds ask for the same
    for round_ in range(2):  # the second time from the pages of the first
        tokens: dict[str, list[int]] = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
        assert engine.stats()["pages_free"] == 64
        for name, prompt in prompts.items():
            assert len(tokens[name]) == 12
            for count, token in enumerate(tokens[name]):
                text = (*prompt, *tokens[name][:count])
                if text not in after:
                    after[text] = reference.logits(list(text))[-1]
                logits = after[text]
                # Half precision loses less than a tenth of that, the other frequencies more.
                behind = float(logits.max() - logits[token])
                assert behind <= 0.03 * float(logits.std()), (round_, name, count)


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "su", "factor": 2.0}, "`rope_type` must be one of .*got 'su'"),
        ({"rope_type": "linear"}, "`factor` of `rope_type` 'linear'.*above 0, got None"),
        ({"type": "dynamic", "factor": 0}, "`factor` of `rope_type` 'dynamic'.*got 0"),
        ({"rope_type": "yarn", "factor": "4"}, "`factor` of `rope_type` 'yarn'.*got '4'"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": True}, "`beta_fast`.*got True"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1}, "`attention_factor`.*-1"),
        ({"rope_theta": 1.0}, "`rope_theta` of .*above 1, got 1.0"),
        ({"rope_type": "llama3", "factor": 8.0}, "`low_freq_factor`.*got None"),
        (
            {**SCALINGS["llama3"], "high_freq_factor": 1.0},
            "`low_freq_factor` must be less than `high_freq_factor` 1.0, got 1.0",
        ),
        ({**LONGROPE, "long_factor": [1.0] * 7}, "`long_factor` must be a list of 8 numbers"),
        ({**LONGROPE, "short_factor": None}, "`short_factor`.*got None"),
        ({"full_attention": {"rope_type": "default"}}, "parameters of all layers"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1, got 0.5"),
    ],
)
def test_refused(rope: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**SMALL, "head_dim": 16, "rope_parameters": rope})


def test_models_of_every_kind_are_compared():
    """`test_against_transformers` has a model with each kind of scaling."""
    kinds = {
        options.get("rope_parameters", {}).get("rope_type", "default")
        for _, options in ARCHITECTURES.values()
    }
    assert kinds == {rope["rope_type"] for rope in SCALINGS.values()}
