"""Softmax, draws and filters against their references, and what sampling promises beyond them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_matches_reference

VOCABULARIES = [1, 7, 1000, 4097, 32000, 50257, 128256]
# A cluster of CTAs draws from a long row; references have no such cases, and take seconds.
LONG = 128256 if torch.cuda.is_available() else 9000
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Draw = Callable[..., Any]
DRAWS: dict[str, Draw] = {
    "probs": lambda p, **key: flashinfer.sampling_from_probs(p, **key),
    "logits": lambda p, **key: flashinfer.sampling_from_logits(p.log(), **key),
    "top_p": lambda p, **key: flashinfer.top_p_sampling_from_probs(p, 0.8, **key),
    "top_k": lambda p, **key: flashinfer.top_k_sampling_from_probs(p, 40, **key),
    "large top_k": lambda p, **key: flashinfer.top_k_sampling_from_probs(p, 700, **key),
    "min_p": lambda p, **key: flashinfer.min_p_sampling_from_probs(p, 0.2, **key),
    "both": lambda p, **key: flashinfer.top_k_top_p_sampling_from_probs(p, 40, 0.8, **key),
    "joint": lambda p, **key: flashinfer.top_k_top_p_sampling_from_probs(
        p, 40, 0.8, filter_apply_order="joint", **key
    ),
    "both of logits": lambda p, **key: flashinfer.top_k_top_p_sampling_from_logits(
        p.log(), 40, 0.8, **key
    ),
    "joint of logits": lambda p, **key: flashinfer.top_k_top_p_sampling_from_logits(
        p.log(), 40, 0.3, filter_apply_order="joint", **key
    ),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def random_logits(
    rows: int, vocab_size: int, device: torch.device, scale: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, vocab_size, device=device) * scale


def random_probs(
    rows: int, vocab_size: int, device: torch.device, scale: float = 3.0
) -> torch.Tensor:
    return torch.softmax(random_logits(rows, vocab_size, device, scale), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_softmax(vocab_size, dtype, device):
    logits = random_logits(3, vocab_size, device).to(dtype)
    for temperature in (None, 0.5, torch.tensor([0.1, 1.0, 7.0], device=device)):
        got = flashinfer.softmax(logits, temperature)
        divisor = temperature.view(-1, 1).double() if torch.is_tensor(temperature) else temperature
        wanted = torch.softmax(logits.double() / (1.0 if divisor is None else divisor), -1)
        # exp is good to two units in the last place, of an argument of up to a hundred.
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("vocab_size", [1, 8192, 8193, 40000, 128256, 140000])
def test_softmax_of_a_row_does_not_depend_on_its_batch(vocab_size, device):
    """One row is taken by tiles, several by clusters where they fit: the same bits."""
    logits = random_logits(6, vocab_size, device)
    together = flashinfer.softmax(logits, 0.7)
    for i in range(6):
        assert torch.equal(flashinfer.softmax(logits[i : i + 1], 0.7)[0], together[i])


def test_softmax_limits(device):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[1.0, 5.0, 5.0], [inf, 1.0, inf], [-inf, -inf, -inf], [nan, 1.0, 2.0]], device=device
    )
    got = flashinfer.softmax(logits, torch.tensor([0.0, 1.0, 1.0, 1.0], device=device))
    assert got[0].tolist() == [0, 0.5, 0.5]
    assert got[1].tolist() == [0.5, 0, 0.5]
    assert got[2:].isnan().all()
    tiny = flashinfer.softmax(logits[:1], 1e-38)
    assert tiny[0].tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("k", [1, 5, 50, 1000, 10**6])
def test_top_k_keeps_what_a_sort_keeps(k, vocab_size, dtype, device):
    logits = random_logits(4, vocab_size, device).to(dtype)
    bound = logits.float().sort(descending=True).values[:, min(k, vocab_size) - 1 :][:, :1]
    kept = logits.float() >= bound
    got = flashinfer.top_k_mask_logits(logits, k)
    assert torch.equal(got.float(), logits.float().masked_fill(~kept, -math.inf))
    probs = torch.softmax(logits.float(), -1)
    probs = flashinfer.top_k_renorm_probs(probs, k)
    assert torch.equal(probs > 0, kept & (torch.softmax(logits.float(), -1) > 0))
    torch.testing.assert_close(probs.sum(-1), torch.ones(4, device=device))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0])
def test_top_p_keeps_what_a_sort_keeps(p, vocab_size, device):
    probs = random_probs(16, vocab_size, device)
    values, order = probs.double().sort(descending=True)
    total = values.cumsum(-1)
    single = float(torch.tensor(p, dtype=torch.float32))
    last = (total < single * total[:, -1:]).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    kept = probs.double() >= values.gather(1, last)
    if p >= 1:
        kept = probs > 0
    assert torch.equal(flashinfer.top_p_renorm_probs(probs, p) > 0, kept)


def test_ties_are_all_in_or_all_out(device):
    probs = torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.1]], device=device)
    assert (flashinfer.top_k_renorm_probs(probs, 2) > 0).tolist() == [[True] * 4 + [False]]
    assert (flashinfer.top_p_renorm_probs(probs, 0.4) > 0).tolist() == [[True] * 4 + [False]]


def test_ten_thousand_rows_keep_what_a_sort_keeps(device, full):
    rows = 10_000 if device.type == "cuda" or full else 50
    probs = random_probs(rows, 5003, device)
    values = probs.double().sort(descending=True).values
    total = values.cumsum(-1)
    p = torch.rand(rows, device=device)
    last = (total < p.double().view(-1, 1) * total[:, -1:]).sum(-1, keepdim=True)
    kept = probs.double() >= values.gather(1, last.clamp(max=5002))
    assert torch.equal(flashinfer.top_p_renorm_probs(probs, p) > 0, kept)
    k = torch.randint(1, 5003, (rows,), device=device, dtype=torch.int32)
    kept = probs.double() >= values.gather(1, k.long().view(-1, 1) - 1)
    assert torch.equal(flashinfer.top_k_renorm_probs(probs, k) > 0, kept & (probs > 0))


@pytest.mark.parametrize("vocab_size", [1, 33, 4097, 20011])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_those_of_the_reference(vocab_size, dtype, device):
    probs = random_probs(6, vocab_size, device).to(dtype)
    number = torch.arange(6, device=device)
    key = {"seed": number * 7, "offset": number + 3}
    column = {**key, "seed": key["seed"][:, None]}
    assert_matches_reference(flashinfer.sampling_from_probs, probs=probs, **column)
    k, p = (number * 9 + 1).int(), (number + 1) / 7
    some_k = torch.where(number % 2 == 0, vocab_size, k)
    for api, filters in (
        (flashinfer.sampling_from_probs, {}),
        (flashinfer.top_p_sampling_from_probs, {"top_p": p}),
        (flashinfer.top_k_sampling_from_probs, {"top_k": k}),
        (flashinfer.min_p_sampling_from_probs, {"min_p": p}),
        (flashinfer.top_k_top_p_sampling_from_probs, {"top_k": k, "top_p": p}),
        (
            flashinfer.top_k_top_p_sampling_from_probs,
            {"top_k": k, "top_p": p, "filter_apply_order": "joint"},
        ),
        (flashinfer.top_k_top_p_sampling_from_probs, {"top_k": some_k, "top_p": p}),
    ):
        assert_matches_reference(api, probs=probs, **filters, **key)
    logits = probs.float().log().to(dtype)
    assert_matches_reference(flashinfer.sampling_from_logits, logits=logits, **key)


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
@pytest.mark.parametrize("p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("rows", [3, 12])
def test_a_top_k_that_keeps_all_draws_the_same_as_a_number_and_as_a_tensor(
    rows, p, order, device, full
):
    vocab_size = 12007 if device.type == "cuda" else 501
    probs = random_probs(rows, vocab_size, device)
    probs[0] = 1.0
    probs[1] = torch.exp2(-torch.arange(vocab_size, device=device) / 8.0)
    single = torch.full((rows,), p, device=device)
    key = {"filter_apply_order": order, "offset": torch.arange(rows, device=device)}
    for api, values in (
        (flashinfer.top_k_top_p_sampling_from_probs, probs),
        (flashinfer.top_k_top_p_sampling_from_logits, probs.log()),
    ):
        for seed in range((60 if full else 15) if device.type == "cuda" else 3):
            key["seed"] = torch.full((rows,), seed, device=device)
            wanted = api(values, 0, p, **key)
            for number in (0, vocab_size, vocab_size + 9):
                k = torch.full((rows,), number, dtype=torch.int32, device=device)
                assert torch.equal(api(values, number, single, **key), wanted)
                assert torch.equal(api(values, k, p, **key), wanted)
                assert torch.equal(api(values, k, single, **key), wanted)
            # Nor does it matter what top-k the other rows have.
            k[1::2] = 5
            assert torch.equal(api(values, k, p, **key)[::2], wanted[::2])


@each_draw
def test_a_row_does_not_depend_on_its_batch(draw, device, full):
    """With a column of seeds: the same token under permutations and paddings, bit for bit."""
    rows, changes = 17, (1000 if full else 40) if device.type == "cuda" else 2
    vocab_size = 30011 if device.type == "cuda" else 501
    probs = random_probs(rows, vocab_size, device)
    seed = torch.randint(2**60, (rows, 1), device=device)
    offset = torch.randint(2**40, (rows,), device=device)
    usual = draw(probs, seed=seed, offset=offset)
    alone = [draw(probs[i : i + 1], seed=seed[i : i + 1], offset=offset[i : i + 1]) for i in (0, 5)]
    assert torch.cat(alone).tolist() == usual[[0, 5]].tolist()
    for _ in range(changes):
        padding = int(torch.randint(0, 300, ()))
        order = torch.cat([torch.randperm(rows), torch.randint(rows, (padding,))]).to(device)
        order = order[torch.randperm(len(order)).to(device)]
        moved = draw(probs[order], seed=seed[order], offset=offset[order])
        assert torch.equal(moved, usual[order])
    # Another alignment of the same row.
    shifted = torch.empty(rows * (vocab_size + 1) + 1, device=device)[1:].view(rows, -1)
    shifted = shifted[:, :vocab_size].copy_(probs)
    assert torch.equal(draw(shifted, seed=seed, offset=offset), usual)


@pytest.mark.parametrize("rows", [3, 12])
def test_top_p_tokens_of_awkward_rows(rows, device):
    """Nuclei that end among thousands of equal elements, among denormals, or very deep."""
    vocab_size = 12007
    probs = random_probs(rows, vocab_size, device)
    probs[0] = 1.0
    probs[1] = (random_probs(1, vocab_size, device, 0.1) * 1e5).round()
    probs[2] = 1e-40 * torch.arange(vocab_size, device=device)
    if rows > 3:
        probs[3] = torch.exp2(-torch.arange(vocab_size, device=device) / 300.0)
        probs[4, 5] = 1e30
        probs[5] = -1.0
        probs[5, 100:9000] = 0.25
    for p in (-1.0, 0.3, 0.9, 0.99999, 1.0 - 2.0**-24):
        for seed in (1, 2, 3) if device.type == "cuda" else (1,):
            assert_matches_reference(
                flashinfer.top_p_sampling_from_probs, probs=probs, top_p=p, seed=seed
            )


def test_seeds_of_a_list_differ(device):
    probs = torch.full((4, 1000), 1e-3, device=device)
    different = flashinfer.sampling_from_probs(
        probs, seed=torch.tensor([1111, 2222, 3333, 4444], device=device)
    )
    same = flashinfer.sampling_from_probs(probs, seed=torch.full((4,), 1111, device=device))
    shared = flashinfer.sampling_from_probs(probs, seed=1111)
    assert len(set(different.tolist())) == 4
    column = flashinfer.sampling_from_probs(probs, seed=torch.full((4, 1), 1111, device=device))
    assert torch.equal(same, shared) and len(set(shared.tolist())) == 4
    assert len(set(column.tolist())) == 1
    for wrong in (torch.ones(3, 1), torch.ones(1, 4), torch.ones(4, 1, 1)):
        with pytest.raises(ValueError, match="`seed`"):
            flashinfer.sampling_from_probs(probs, seed=wrong.long().to(device))
    with pytest.raises(ValueError, match="`offset`"):
        flashinfer.sampling_from_probs(probs, seed=1, offset=torch.ones(4, 1).long().to(device))


@pytest.mark.gpu
def test_a_generator_is_advanced():
    probs = torch.full((64, 1000), 1e-3, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    first = flashinfer.sampling_from_probs(probs, generator=generator)
    second = flashinfer.sampling_from_probs(probs, generator=generator)
    generator.manual_seed(5)
    assert not torch.equal(first, second)
    assert torch.equal(first, flashinfer.sampling_from_probs(probs, generator=generator))
    torch.cuda.manual_seed(9)
    default = flashinfer.sampling_from_probs(probs)
    torch.cuda.manual_seed(9)
    assert torch.equal(default, flashinfer.sampling_from_probs(probs))


@pytest.mark.gpu
@each_draw
def test_chi_square(draw):
    """A million draws from one distribution, for flat and for peaked ones."""
    draws = 1_000_000
    for scale, vocab_size in ((0.5, 1200), (2.5, 5000)):
        probs = random_probs(1, vocab_size, torch.device("cuda"), scale)
        row = torch.zeros(draws, dtype=torch.int32, device="cuda")
        counts = draw(probs, indices=row, seed=17).long().bincount(minlength=vocab_size).double()
        kept = _kept_by(draw, probs)
        assert counts[~kept[0]].sum() == 0
        expected = (probs.double() * kept)[0][kept[0]]
        expected = expected / expected.sum() * draws
        observed = counts[kept[0]]
        # Rare elements go into one class, as the statistic wants at least five of each.
        rare = expected < 5
        expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
        observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
        counted = expected > 0
        statistic = ((observed - expected).square() / expected)[counted].sum().item()
        freedom = max(int(counted.sum()) - 1, 1)
        # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
        score = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
        assert score / math.sqrt(2 / (9 * freedom)) < 4, (scale, statistic, freedom)


def _kept_by(draw: Draw, probs: torch.Tensor) -> torch.Tensor:
    name = next(name for name, function in DRAWS.items() if function is draw)
    values = probs.double().sort(descending=True).values
    total = values.cumsum(-1)

    def nucleus(p: float, mass: torch.Tensor) -> torch.Tensor:
        return values.gather(1, (total < p * mass).sum(-1, keepdim=True))

    if name in ("probs", "logits"):
        return probs > 0
    if name == "top_p":
        return probs.double() >= nucleus(0.8, total[:, -1:])
    if name == "min_p":
        return probs >= 0.2 * probs.max()
    k = 700 if name == "large top_k" else 40
    kept = probs.double() >= values[:, k - 1 : k]
    if name.startswith("both"):
        kept &= probs.double() >= nucleus(0.8, total[:, k - 1 : k])
    if name.startswith("joint"):
        p = 0.3 if "logits" in name else 0.8
        kept &= probs.double() >= nucleus(p, total[:, -1:])
    return kept


def test_per_row_filters_beyond_their_range(device):
    probs = random_probs(6, 5003, device)
    k = torch.tensor([0, -1, 1, 5003, 2**31 - 1, 3], dtype=torch.int32, device=device)
    kept = (flashinfer.top_k_renorm_probs(probs, k) > 0).sum(-1)
    assert kept.tolist() == [5003, 5003, 1, 5003, 5003, 3]
    p = torch.tensor([0.0, -1.0, 1.0, 7.0, math.inf, -math.inf], device=device)
    kept = (flashinfer.top_p_renorm_probs(probs, p) > 0).sum(-1)
    assert kept.tolist() == [1, 1, 5003, 5003, 5003, 1]
    flat = torch.ones(2, 5003, device=device)
    for share in (-1.0, -math.inf):
        p = torch.full((2,), share, device=device)
        assert (flashinfer.top_p_renorm_probs(flat, p) > 0).all()
    nan = torch.full((6,), math.nan, device=device)
    tokens, valid = flashinfer.top_p_sampling_from_probs(probs, nan, seed=1, return_valid=True)
    assert not tokens.any() and not valid.any()


@pytest.mark.parametrize("vocab_size", [5, 4099, LONG])
def test_rows_without_distribution_do_not_touch_others(vocab_size, device):
    probs = random_probs(9, vocab_size, device)
    seed = torch.arange(9, device=device)
    usual = flashinfer.sampling_from_probs(probs, seed=seed)
    spoilt = probs.clone()
    spoilt[1, vocab_size // 2] = math.nan
    spoilt[2] = 0
    spoilt[3] = math.inf
    spoilt[4] = -math.inf
    spoilt[5] = -1
    others = [0, 6, 7, 8]
    for name, draw in DRAWS.items():
        tokens, wanted = draw(spoilt, seed=seed), draw(probs, seed=seed)
        assert tokens[others].tolist() == wanted[others].tolist(), name
    for api, more in (
        (flashinfer.sampling_from_probs, ()),
        (flashinfer.top_p_sampling_from_probs, (1.0,)),
        (flashinfer.top_k_sampling_from_probs, (0,)),
        (flashinfer.min_p_sampling_from_probs, (0.0,)),
    ):
        tokens, valid = api(spoilt, *more, seed=seed, return_valid=True)
        assert valid.tolist() == [True, False, False, False, False, False, True, True, True]
        assert tokens[1:6].tolist() == [0] * 5
        assert tokens[others].tolist() == usual[others].tolist()


def test_one_positive_element_is_always_drawn(device):
    for value in (1.0, 1e-30, 1e-45, 1e38):
        probs = torch.zeros(3, 70001, device=device)
        probs[:, 70000] = value
        for name, draw in DRAWS.items():
            assert draw(probs, seed=3).tolist() == [70000] * 3, (name, value)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_outputs_of_every_batch_size(rows, device):
    probs = random_probs(rows, 101, device)
    for draw in DRAWS.values():
        tokens = draw(probs, seed=1)
        assert tokens.shape == (rows,) and tokens.dtype == torch.int32
    assert flashinfer.softmax(probs).shape == (rows, 101)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert flashinfer.sampling_from_probs(probs, indices=none, seed=1).shape == (0,)


@pytest.mark.gpu
def test_a_captured_graph_draws_anew():
    probs = torch.full((8, 5000), 1.0, device="cuda")
    seed = torch.zeros(8, dtype=torch.int64, device="cuda")
    for name, draw in DRAWS.items():
        draw(probs, seed=seed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = draw(probs, seed=seed)
        results = []
        for number in (1, 2):
            seed.fill_(number)
            graph.replay()
            results.append(tokens.tolist())
            assert tokens.tolist() == draw(probs, seed=seed).tolist(), name
        assert results[0] != results[1], name
    with pytest.raises(RuntimeError, match="seed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flashinfer.sampling_from_probs(probs)
