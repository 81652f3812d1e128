"""``BatchMLAPagedAttentionWrapper``: results of batches of every kind, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.mla import batches
from tests.mla.batches import BF16, FP16, Batch, check, indptr, make_wrapper, need_hopper

MIXED = (700, 64, 0, 1, 129, 1300)


@pytest.fixture(autouse=True, params=batches.BACKENDS)
def backend(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Every test runs with every kernel."""
    if request.param != "fa2":
        need_hopper(device)
    monkeypatch.setattr(batches, "default_backend", request.param)
    return request.param


def run(batch: Batch, device: torch.device, **arguments: Any) -> dict[str, torch.Tensor]:
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    return check(wrapper, **batch.arguments(device), **{"return_lse": True, **arguments})


@pytest.mark.parametrize(("dtype", "most"), [(FP16, 1e-6), (BF16, 4e-6)])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_cosine(num_heads: int, dtype: torch.dtype, most: float, device: torch.device):
    """1 - cosine of results and exact ones: 1.4e-6 if exact ones are only rounded to bfloat16."""
    batch = Batch((1, 1, 1), (4096, 1000, 64), num_heads, dtype=dtype)
    wrapper, call = make_wrapper(device), batch.arguments(device)
    batch.plan(wrapper)
    starts, pages, _ = batch.pages()
    query, cache = (batch.query(device).double(), batch.cache(device).double())
    for b, found in enumerate(wrapper.run(**call).double()):
        keys = cache[pages[starts[b] : starts[b + 1]].long()].flatten(0, 1)[: batch.kv_lens[b]]
        weights = (query[b] @ keys.T * 192**-0.5).softmax(-1)
        exact = weights @ keys[:, : batch.head_dim_ckv]
        cosine = (exact * found).sum() / (exact.norm() * found.norm())
        assert 1.0 - cosine.item() < most


@pytest.mark.parametrize("num_heads", [8, 12, 16, 20, 40, 96, 128])
def test_decode(num_heads: int, device: torch.device, full: bool):
    if device.type != "cuda" and num_heads > 16 and not full:
        pytest.skip("needs a GPU: without one, more heads are more of the same")
    run(Batch((1,) * 6, MIXED, num_heads), device)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((512, 64), FP16), ((512, 0), BF16), ((256, 64), BF16), ((256, 0), BF16)],
)
def test_head_sizes(dims: tuple[int, int], dtype: torch.dtype, device: torch.device):
    run(Batch((1, 1, 2), (300, 64, 5), 16, *dims, dtype=dtype), device)


@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 24, 32, 48, 100, 128])
def test_page_sizes(page_size: int, device: torch.device):
    run(Batch((1, 2, 1), (700, 130, 3), 16, page_size=page_size, causal=True), device)


@pytest.mark.parametrize("num_heads", [16, 20, 128])
@pytest.mark.parametrize("qo_lens", [(2,) * 4, (5, 1, 3, 2), (70, 1, 64, 3)])
def test_several_queries(
    qo_lens: tuple[int, ...], num_heads: int, device: torch.device, full: bool
):
    if device.type != "cuda" and (num_heads > 16 or max(qo_lens) > 5) and not full:
        pytest.skip("needs a GPU: the reference takes long")
    for causal in (True, False):
        run(Batch(qo_lens, (700, 1, 64, 300), num_heads, causal=causal), device)


def test_more_queries_than_tokens(device: torch.device):
    """Queries before the first token see nothing: 0, and an LSE of -inf."""
    outputs = run(Batch((5, 3), (2, 0), causal=True), device)
    assert (outputs["output"][:3] == 0).all() and (outputs["lse"][:3] == -math.inf).all()
    assert (outputs["output"][5:] == 0).all()


def test_sinks_and_scales(device: torch.device):
    batch = Batch((1, 2, 1), (700, 130, 0), 16, causal=True)
    sinks = torch.linspace(-3, 3, 16, device=device)
    run(batch, device, sinks=sinks)
    run(batch, device, sinks=sinks, ckv_scale=0.5, kpe_scale=0.5, return_lse_base_on_e=True)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_strides(device: torch.device, num_heads: int):
    """Queries as a transposed product leaves them, one cache of both parts, a wider output."""
    batch = Batch((1, 2), (700, 130), num_heads)
    arguments = batch.arguments(device)
    arguments["q_nope"] = arguments["q_nope"].transpose(0, 1).contiguous().transpose(0, 1)
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    wide = torch.empty(3, num_heads, 640, dtype=BF16, device=device)
    check(wrapper, **arguments, out=wide[..., 64:576])


def test_packed_forms(device: torch.device):
    batch = Batch((1, 1), (700, 130), 16)
    starts, indices, _ = batch.pages()
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    expected = wrapper.run(**batch.arguments(device))
    packed = {"query": batch.query(device), "kv_cache": batch.cache(device)}
    assert torch.equal(wrapper.run(**packed), expected)
    table = torch.zeros(2, int(starts.diff().max()), dtype=torch.int32)
    for row, own in zip(table, indices.split(starts.diff().tolist()), strict=True):
        row[: len(own)] = own
    dense = MLAPlanMetadata.dense(
        indptr((1, 1)), table.to(device), torch.tensor((700, 130), dtype=torch.int32), 1
    )
    wrapper.plan(
        *(None,) * 4,
        *(16, 512, 64, 64, False, 192**-0.5, BF16, BF16),
        metadata=dense,
        query_layout="packed",
        kv_cache_layout="packed",
    )
    assert torch.equal(wrapper.run(**packed), expected)


@pytest.mark.parametrize("page_size", [1, 64])
def test_caches_with_their_head(page_size: int, device: torch.device):
    """[num_pages, page_size, 1, columns], as engines whose caches all have heads keep them."""
    batch = Batch((1, 1), (700, 130), 16, page_size=page_size)
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    arguments = batch.arguments(device)
    expected = wrapper.run(**arguments)
    for name in ("ckv_cache", "kpe_cache"):
        arguments[name] = arguments[name].unsqueeze(2)
    assert torch.equal(wrapper.run(**arguments), expected)
    arguments["ckv_cache"] = arguments["ckv_cache"].expand(-1, -1, 2, -1)
    with pytest.raises(ValueError, match="`?ckv_cache"):
        wrapper.run(**arguments)


def test_a_part_of_a_page_table(device: torch.device):
    """Offsets of the last requests only, which begin after the pages of the others."""
    batch = Batch((1, 1, 1), (700, 130, 64), 16)
    wrapper, arguments = make_wrapper(device), batch.arguments(device)
    batch.plan(wrapper)
    expected = wrapper.run(**arguments)
    starts, indices, _ = batch.pages()
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    table = (indptr((1, 1)), starts[1:], indices.to(device), lengths[1:])
    wrapper.plan(*table, 16, 512, 64, 64, False, 192**-0.5, BF16, BF16)
    part = check(
        wrapper, **{**arguments, "q_nope": arguments["q_nope"][1:], "q_pe": arguments["q_pe"][1:]}
    )
    torch.testing.assert_close(part["output"].float(), expected[1:].float(), rtol=0.01, atol=0.01)


def test_large_logits(device: torch.device):
    """Where one token has nearly all weight, it is that token's row."""
    batch = Batch((1, 1), (700, 1300), 16)
    wrapper = make_wrapper(device)
    batch.plan(wrapper, sm_scale=4.0)
    check(wrapper, **batch.arguments(device), return_lse=True)


@pytest.mark.gpu
def test_results_repeat(device: torch.device, full: bool):
    batch = Batch((1, 1, 4), (5000, 70, 900), 128)
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    arguments = batch.arguments(device)
    first = wrapper.run(**arguments)
    for _ in range(10000 if full else 200):
        assert torch.equal(wrapper.run(**arguments), first)


@pytest.mark.gpu
def test_a_bad_row_is_its_own(device: torch.device):
    """A head's NaN is seen in its output and nowhere else, whether its request is cut or not."""
    batch = Batch((1, 1), (5000, 70), 20)
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    arguments = batch.arguments(device)
    expected = wrapper.run(**arguments)
    arguments["q_nope"] = arguments["q_nope"].clone()
    arguments["q_nope"][:, 3, 100] = math.nan
    output = wrapper.run(**arguments)
    assert output[:, 3].isnan().all()
    others = torch.arange(20, device=device) != 3
    assert torch.equal(output[:, others], expected[:, others])


@pytest.mark.gpu
def test_graph_of_changing_lengths(device: torch.device):
    """One captured launch serves batches that are planned later, by plan() or as engines do."""
    capacity, i32 = 6, {"dtype": torch.int32, "device": device}
    buffers = [torch.zeros(n, **i32) for n in (capacity + 1, capacity + 1, 400, capacity)]
    wrapper = make_wrapper(
        device,
        use_cuda_graph=True,
        **dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), buffers, strict=True)),
    )
    largest = Batch((1,) * capacity, (4000,) * capacity, 128)
    arguments = largest.arguments(device)
    arguments = {name: tensor.nan_to_num(0.0) for name, tensor in arguments.items()}
    graph = torch.cuda.CUDAGraph()
    out = torch.empty(capacity, 128, 512, dtype=BF16, device=device)
    largest.plan(wrapper)
    wrapper.run(**arguments, out=out)
    with torch.cuda.graph(graph):
        wrapper.run(**arguments, out=out)
    for lengths in ((100,) * 6, (4500, 3, 0, 77), (64, 4000, 128)):
        batch = Batch((1,) * len(lengths), lengths, 128)
        starts, indices, _ = batch.pages()
        wrapper._kv_indices_buf[: len(indices)].copy_(indices)
        wrapper._cached_module.plan(
            *(wrapper._float_workspace_buffer, wrapper._int_workspace_buffer),
            wrapper._pin_memory_int_workspace_buffer,
            *(indptr(batch.qo_lens), starts, torch.tensor(lengths, dtype=torch.int32)),
            *(128, 512, False),
        )
        out.fill_(math.nan)
        graph.replay()
        replayed = out.clone()
        eager = make_wrapper(device)
        batch.plan(eager)
        expected = eager.run(**arguments)
        assert torch.equal(replayed[: len(lengths)], expected[: len(lengths)])


# ---- refusals ----------------------------------------------------------------------------------


def test_run_before_plan(device: torch.device):
    with pytest.raises(ValueError, match="plan.* must be called before .*run"):
        make_wrapper(device).run(**Batch((1,), (5,)).arguments(device))


PLAN_FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"qo_indptr": torch.tensor([0, 2, 1], dtype=torch.int32)}, ValueError, "`qo_indptr`"),
    ({"kv_len_arr": torch.tensor([129, 1], dtype=torch.int32)}, ValueError, "`kv_len_arr`"),
    ({"kv_len_arr": torch.tensor([-1, 1], dtype=torch.int32)}, ValueError, "`kv_len_arr`"),
    ({"kv_indptr": torch.tensor([0, 2], dtype=torch.int32)}, ValueError, "`kv_indptr`"),
    ({"kv_indices": torch.zeros(2, dtype=torch.int32)}, ValueError, "`kv_indices`"),
    ({"kv_indices": None}, TypeError, "`kv_indices`"),
    ({"num_heads": 0}, ValueError, "`num_heads`"),
    ({"num_heads": 1.5}, TypeError, "`num_heads`"),
    ({"head_dim_ckv": 384}, ValueError, "`head_dim_ckv`"),
    ({"page_size": 0}, ValueError, "`page_size`"),
    ({"causal": 1}, TypeError, "`causal`"),
    ({"sm_scale": 0.0}, ValueError, "`sm_scale`"),
    ({"q_data_type": torch.float32}, ValueError, "`q_data_type`"),
    ({"kv_data_type": FP16}, ValueError, "`kv_data_type`"),
    ({"use_profiler": 1}, TypeError, "`use_profiler`"),
    ({"lse_mode": "log2"}, ValueError, "`lse_mode`"),
    ({"output_scale": "per-tensor"}, ValueError, "`output_scale`"),
    ({"scale_mode": "bmm-tensor"}, ValueError, "`scale_mode`"),
    ({"skip_softmax": True}, ValueError, "`skip_softmax`"),
    ({"max_q_len": 0}, ValueError, "`max_q_len`"),
    ({"query_layout": "both"}, ValueError, "`query_layout`"),
    ({"metadata": MLAPlanMetadata()}, ValueError, "`qo_indptr`"),
]


@pytest.mark.parametrize(("change", "error", "match"), PLAN_FAULTS)
def test_plan_refuses(
    change: dict[str, Any], error: type[Exception], match: str, device: torch.device
):
    i32 = {"dtype": torch.int32}
    usual = {
        "qo_indptr": torch.tensor([0, 1, 2], **i32),
        "kv_indptr": torch.tensor([0, 2, 3], **i32),
        "kv_indices": torch.tensor([0, 1, 2], **i32),
        "kv_len_arr": torch.tensor([100, 64], **i32),
        "num_heads": 16,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": 64,
        "causal": False,
        "sm_scale": 0.1,
        "q_data_type": BF16,
        "kv_data_type": BF16,
    }
    wrapper = make_wrapper(device)
    wrapper.plan(**usual)
    with pytest.raises(error, match=match):
        wrapper.plan(**{**usual, **change})
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(**Batch((1, 1), (100, 64)).arguments(device))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q_nope": lambda t: t[:1]}, "q_nope"),
        ({"q_nope": lambda t: t[:, :8]}, "q_nope|q_pe|num_heads"),
        ({"q_pe": lambda t: t.float()}, "q_pe"),
        ({"ckv_cache": lambda t: t[:, :32]}, "ckv_cache|kpe_cache"),
        ({"kpe_cache": lambda t: t[1:]}, "kpe_cache"),
        ({"profiler_buffer": lambda t: torch.zeros(1)}, "`profiler_buffer`"),
        ({"o_scale": lambda t: 1.0}, "`o_scale`"),
        ({"ckv_scale": lambda t: -1.0}, "`ckv_scale`"),
        ({"ckv_scale": lambda t: 2.0}, "`kpe_scale`"),
        ({"bmm1_scale": lambda t: 1.0}, "`bmm1_scale`"),
        ({"out": lambda t: torch.empty(2, 16, 500)}, "out"),
    ],
)
def test_run_refuses(change: dict[str, Any], match: str, device: torch.device):
    batch = Batch((1, 1), (100, 64))
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    arguments = batch.arguments(device)
    for name, how in change.items():
        arguments[name] = how(arguments.get(name))
    with pytest.raises((ValueError, TypeError), match=match):
        wrapper.run(**arguments)


def test_outputs_over_inputs_and_over_one_another(device: torch.device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: the kernel's binding looks at memory")
    batch = Batch((1, 1), (100, 64))
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    arguments = batch.arguments(device)
    cache, out = arguments["ckv_cache"], torch.empty_like(arguments["q_nope"])
    for change, match in (
        ({"out": cache.flatten(0, 1)[:32].view(2, 16, -1)}, "`out`.*`ckv_cache`"),
        ({"out": arguments["q_nope"]}, "`out`.*`q_nope`"),
        ({"lse": torch.empty(2, 32, device=device)[:, ::2]}, "`lse` must be contiguous"),
        ({"out": out, "lse": out.view(-1).view(torch.float32)[:32].view(2, 16)}, "`lse`.*`out`"),
    ):
        with pytest.raises(ValueError, match=match):
            wrapper.run(**arguments | change)


def test_small_workspace(device: torch.device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: plans without one write nothing")
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1000, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="`float_workspace_buffer` is too small"):
        Batch((1, 1), (5000, 64), 128).plan(wrapper)
