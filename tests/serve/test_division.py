"""How tensors divide among ranks: parts make the whole again, and what has no equal parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.serve.config import ModelConfig
from examples.serve.layers.attention import Rope
from examples.serve.layers.division import COLUMNS, ROWS, Cut, Ranks
from examples.serve.layers.stored import Fp8PerBlock, Fp8PerRow, Int4, Plain, Stored
from examples.serve.layers.weights import Weights
from examples.serve.model import Model
from examples.serve.models import architectures
from examples.serve.parallel import Parallel
from examples.serve.shapes import SHAPES, RandomWeights

E4M3 = torch.float8_e4m3fn


def _int4(rows: int, columns: int, groups: int, order: torch.Tensor | None = None) -> Int4:
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
    zeros = torch.randint(16, (rows, groups), dtype=torch.uint8)
    return Int4(codes, zeros, torch.rand(rows, groups).half(), order)


STORED: dict[str, Callable[[], Stored]] = {
    "plain": lambda: Plain(torch.randn(256, 512)),
    "fp8-row": lambda: Fp8PerRow(torch.randn(256, 512).to(E4M3), torch.rand(256)),
    "fp8-block": lambda: Fp8PerBlock(torch.randn(256, 512).to(E4M3), torch.rand(2, 4)),
    "int4": lambda: _int4(256, 512, 4),
    "int4-one-group": lambda: _int4(256, 512, 1),
}


@pytest.mark.parametrize("name", STORED)
def test_parts_stand_for_the_numbers_of_the_whole(name: str):
    matrix = STORED[name]()
    dense = matrix.dense(torch.float32)
    ranges = [(128, 256), (384, 512)]
    assert torch.equal(
        matrix.columns(ranges).dense(torch.float32),
        torch.cat([dense[:, 128:256], dense[:, 384:]], 1),
    )
    assert torch.equal(matrix.rows([(128, 256)]).dense(torch.float32), dense[128:])
    # A part of its own: the whole can be freed.
    dense_part = matrix.rows([(0, 128)])
    for tensor in vars(dense_part).values():
        if isinstance(tensor, torch.Tensor):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_rows_in_any_order_of_columns():
    order = torch.randperm(64)
    matrix = _int4(16, 64, 2, order)
    dense = matrix.dense(torch.float32)
    assert torch.equal(matrix.rows([(4, 8)]).dense(torch.float32), dense[4:8])
    with pytest.raises(ValueError, match="`g_idx` has columns of a group in several parts"):
        matrix.columns([(0, 32)])


@pytest.mark.parametrize("name, group", [("fp8-block", 128), ("int4", 128)])
def test_a_cut_between_elements_that_share_a_scale(name: str, group: int):
    with pytest.raises(ValueError, match=f"64 is not the border of a group of {group} that share"):
        STORED[name]().columns([(0, 64)])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sections(ranks: int):
    """Every section is divided on its own, and all ranks together have each element once."""
    cut, size = Cut(0, sections=(16, 8, 24)), 48
    parts = [cut.ranges(size, rank, ranks) for rank in range(ranks)]
    for number, (begin, end) in enumerate(((0, 16), (16, 24), (24, 48))):
        elements = [i for part in parts for i in range(*part[number])]
        assert elements == list(range(begin, end))


def test_units_that_ranks_share():
    """Two key/value heads of 16 columns: four ranks have the first, the first, the second, ..."""
    parts = [Cut(0, units=2).ranges(32, rank, 4) for rank in range(4)]
    assert parts == [[(0, 16)], [(0, 16)], [(16, 32)], [(16, 32)]]
    parts = [Cut(0, units=4).ranges(64, rank, 2) for rank in range(2)]
    assert parts == [[(0, 32)], [(32, 64)]]
    with pytest.raises(ValueError, match="48 along axis 0 have no equal parts"):
        Cut(0, units=3).ranges(48, 0, 2)


def test_the_longest_name_counts():
    cuts = {"up_proj": ROWS, "experts.*.up_proj": COLUMNS}
    ranks = Ranks(0, 2, cuts=cuts)
    assert ranks.cut("model.layers.0.mlp.experts.11.up_proj") == COLUMNS
    assert ranks.cut("model.layers.0.mlp.shared_experts.up_proj") == ROWS
    with pytest.raises(ValueError, match="does not say how ranks divide 'mlp.gate_up_proj'"):
        ranks.cut("mlp.gate_up_proj")
    assert Ranks().cut("mlp.gate_up_proj") is None


def test_every_model_has_a_table():
    """Its entries are names that its layers ask for: see test_parallel_families for the rest."""
    for name, kind in architectures().items():
        assert "cuts" in {key for base in kind.__mro__[:-1] for key in vars(base)}, name


class _Rank(Parallel):
    def sum(self, x: torch.Tensor) -> None:
        raise AssertionError("nothing is computed here")


def _model(shape: str, ranks: int, experts: bool = False, **changes: Any) -> Model:
    """The last rank's part of a shape that people serve, without its numbers."""
    values = {**SHAPES[shape], **changes}
    config = ModelConfig.from_dict(values)
    weights = RandomWeights(config, "meta")
    return Model(config, weights, "meta", torch.bfloat16, _Rank(ranks - 1, ranks, experts))


@pytest.mark.parametrize(
    "shape, ranks, experts, message",
    [
        ("llama-8b", 3, False, "`num_attention_heads` must be a multiple of 3 ranks, got 32"),
        ("llama-8b", 2, True, "`expert_parallel` must be False: Llama.* has no experts"),
        ("gpt-oss-20b", 4, False, "down_proj_blocks' cannot be .* 4 ranks: 90 along axis 2"),
        ("gpt-oss-20b", 64, True, "`experts` must be a multiple of 64 ranks, got 32"),
        (
            "deepseek-v3-cut",
            32,
            False,
            "'.*mlp.gate_proj' cannot be divided among 32 ranks: 17856 is not the border",
        ),
        ("qwen3-next-cut", 3, False, "must be a multiple of 3 ranks, got 16"),
    ],
)
def test_what_ranks_cannot_divide(shape: str, ranks: int, experts: bool, message: str):
    with pytest.raises(ValueError, match=message):
        _model(shape, ranks, experts, num_hidden_layers=2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_key_value_heads": 6, "num_attention_heads": 12}, "a multiple or a divisor of 4"),
        ({"intermediate_size": 14338}, "down_proj|gate_proj' cannot be divided among 4 ranks"),
    ],
)
def test_shapes_that_four_ranks_cannot_divide(changes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        _model("llama-8b", 4, num_hidden_layers=1, head_dim=128, **changes)


@pytest.mark.parametrize(
    "shape, ranks, experts",
    [
        ("llama-8b", 8, False),
        ("qwen3-30b-a3b", 8, False),
        ("qwen3-30b-a3b", 8, True),
        ("deepseek-v3-cut", 8, True),
        ("deepseek-v3-cut", 16, False),
        ("gpt-oss-20b", 2, False),
        ("gpt-oss-20b", 8, True),
        ("qwen3-next-cut", 4, False),
        ("qwen3-next-cut", 8, True),
    ],
)
def test_parts_of_shapes_that_people_serve(shape: str, ranks: int, experts: bool):
    """Almost all weights are divided: what every rank has is small beside them."""
    few = {"num_hidden_layers": 4, "num_experts": 64, "n_routed_experts": 64}

    def elements(ranks: int) -> int:
        if ranks == 1:
            config = ModelConfig.from_dict({**SHAPES[shape], **few})
            model = Model(config, RandomWeights(config, "meta"), "meta", torch.bfloat16)
        else:
            model = _model(shape, ranks, experts, **few)
        return sum(_elements(block.body) for block in model.blocks)

    whole, part = elements(1), elements(ranks)
    assert whole / ranks <= part <= 1.35 * whole / ranks


def _elements(part: Any) -> int:
    """Number of all elements of a layer."""
    if isinstance(part, torch.Tensor):
        return part.numel()
    if isinstance(part, Rope):
        return 0
    if isinstance(part, list):
        return sum(map(_elements, part))
    inner = vars(part) if hasattr(part, "__dict__") else {}
    return sum(_elements(value) for value in inner.values())


def test_a_bias_is_added_by_one_rank():
    tensors = {"a.weight": torch.eye(4), "a.bias": torch.ones(4)}
    biases = []
    for rank in range(2):
        take = Weights(dict(tensors), torch.device("cpu"), torch.float32, {})
        take.ranks = Ranks(rank, 2, cuts={"a": COLUMNS})
        biases.append(take.product("", (("a", 4),), 4)(torch.zeros(1, 2)))
    assert torch.equal(biases[0], torch.ones(1, 4)) and not biases[1].any()
