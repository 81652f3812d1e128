"""Checkpoints of 8 and 4 bits divided among ranks, against plain PyTorch and the whole model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.serve.checkpoint import load, write_random_checkpoint
from examples.serve.config import ModelConfig
from examples.serve.layers.linear import Fp8Blocks, Fp8Rows, Int4Groups, Linear
from examples.serve.plain import PlainModel
from examples.serve.runner import Chunk, Runner
from tests.serve.packing import FORMATS, pack_products, packed_mixture
from tests.serve.ranks import ThreadParallel, on_ranks
from tests.serve.test_formats import PROMPT, SHAPE, rounding_of

# Parts of two ranks end where blocks of 128 and groups of 64 do.
WIDE = {**SHAPE, "head_dim": 64, "num_key_value_heads": 4}
CASES = [
    *((name, 2) for name in FORMATS if name != "gptq-order"),
    *((name, 4) for name in ("fp8-static", "fp8-channel", "gptq-zeros")),
]


def _on_ranks(folder: Path, ranks: int, experts: bool = False) -> tuple[torch.Tensor, list[Any]]:
    """Logits after a prompt in two parts, and the bodies of the first rank's model."""

    def divided(parallel: ThreadParallel) -> tuple[torch.Tensor, list[Any]]:
        model, _ = load(folder, "cpu", parallel=parallel)
        return _logits(model), [block.body for block in model.blocks]

    results = on_ranks(ranks, divided, experts)
    for other, _ in results[1:]:
        assert torch.equal(other, results[0][0])
    return results[0]


def _logits(model: Any) -> torch.Tensor:
    runner = Runner(model, 8, 16, model.dtype, 2, False)
    with runner.backend():
        runner.run([Chunk(PROMPT[:9], 0, [5, 2])])
        return runner.run([Chunk(PROMPT[9:], 9, [5, 2])])[0]


@pytest.mark.parametrize("name, ranks", CASES)
def test_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int):
    pack, config, kind = FORMATS[name]
    write_random_checkpoint(tmp_path, WIDE)
    exact = PlainModel(ModelConfig.from_dict(WIDE), pack_products(tmp_path, pack, config))
    rounding = rounding_of(monkeypatch, exact, kind).square().mean().sqrt()
    expected = exact(PROMPT)[-1]
    assert rounding < 0.3 * expected.std()
    got, bodies = _on_ranks(tmp_path, ranks)
    kinds = {type(p) for body in bodies for p in vars(body).values()}
    assert kinds & {Fp8Rows, Fp8Blocks, Int4Groups, Linear} == {kind}, "a part was widened"
    for other in (expected, _logits(load(tmp_path, "cpu")[0])):
        assert (got - other).square().mean().sqrt() <= rounding


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("experts", [False, True], ids=["parts", "experts"])
@pytest.mark.parametrize("name", ["mxfp4", "fp8-block", "gptq"])
def test_mixtures(tmp_path: Path, name: str, experts: bool):
    wide = {"intermediate_size": 64} if name == "mxfp4" else {
        "moe_intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4,
    }  # fmt: skip
    folder, reference = packed_mixture(tmp_path, name, **wide)
    expected = reference.logits(PROMPT)[-1]
    got, bodies = _on_ranks(folder, 2, experts)
    assert bodies[1].experts.options["quant_scales"], "experts were widened"
    bound = (0.15 if name == "fp8-block" else 0.02) * expected.std()
    for other in (expected, _logits(load(folder, "cpu")[0])):
        assert (got - other).square().mean().sqrt() <= bound


@pytest.mark.parametrize(
    "name, changes, ranks, message",
    [
        ("fp8-block", {}, 4, "q_proj' cannot be divided among 4 ranks: 64 is not the border of a"),
        ("fp8-block", {"intermediate_size": 384}, 2, "gate_proj' cannot .*: 192 is not the border"),
        ("gptq-zeros", {"intermediate_size": 192}, 2, "down_proj' cannot .*: 96 is not the border"),
        ("gptq-order", {}, 2, "o_proj' cannot .* `g_idx` has columns of a group in several parts"),
    ],
)
def test_cuts_that_a_format_forbids(
    tmp_path: Path, name: str, changes: dict[str, int], ranks: int, message: str
):
    pack, config, _ = FORMATS[name]
    write_random_checkpoint(tmp_path, {**WIDE, **changes})
    pack_products(tmp_path, pack, config)
    load(tmp_path, "cpu")
    with pytest.raises(ValueError, match=message):
        _on_ranks(tmp_path, ranks)
