"""Latent attention in one call: lengths on the host and on the device, sparse, captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.mla import (
    BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from flashinfer.trace.templates.mla import _mla_paged_reference
from tests.mla.batches import BF16, WORKSPACE_BYTES, indptr, need_hopper, randn

RANK, ROPE = 512, 64
MIXED = (700, 64, 3, 129, 1300)
BACKENDS = ["fa2", "fa3"] if torch.cuda.is_available() else ["auto"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param != "fa2":
        need_hopper(device)
    return request.param


def make(
    device: torch.device, kv_lens: tuple[int, ...], q_len: int, heads: int, page_size: int = 64
) -> dict[str, Any]:
    """Arguments of a call; pages in random order, the table wider than any request needs."""
    width = max(-(-n // page_size) for n in kv_lens) + 2
    pages = width * len(kv_lens) + 1
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    table = order[: width * len(kv_lens)].view(-1, width).int().to(device)
    return {
        "query": randn((len(kv_lens), q_len, heads, RANK + ROPE), BF16, device, 1),
        "kv_cache": randn((pages, page_size, RANK + ROPE), BF16, device, 2),
        "workspace_buffer": torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "block_tables": table,
        "seq_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "max_seq_len": max(kv_lens),
        "bmm1_scale": 192**-0.5,
    }


def expected(call: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, cache, table = call["query"], call["kv_cache"], call["block_tables"]
    cache = cache.view(-1, cache.shape[-2] if cache.ndim == 3 else 1, RANK + ROPE)
    lengths = call["seq_lens"].cpu()
    arguments = {
        "q_nope": query.flatten(0, -3)[..., :RANK],
        "q_pe": query.flatten(0, -3)[..., RANK:],
        "ckv_cache": cache[..., :RANK],
        "kpe_cache": cache[..., RANK:],
        "qo_indptr": indptr([query.shape[1]] * len(lengths)),
        "kv_indptr": torch.arange(len(lengths) + 1) * table.shape[-1],
        "kv_indices": table.flatten(),
        "kv_len_arr": lengths,
        "sm_scale": call["bmm1_scale"],
        "causal": True,
    }
    return _mla_paged_reference(**{**arguments, **changes})


def compare(found: torch.Tensor, wanted: torch.Tensor, limit: float = 0.006) -> None:
    """Rows agree to the rounding of weights and results."""
    found = found.reshape(wanted.shape).double()
    size = wanted.norm(dim=-1)
    error = (found - wanted).norm(dim=-1) / torch.where(size == 0, 1.0, size)
    assert found.isfinite().all() and float(error.max()) < limit


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(("q_len", "heads"), [(1, 16), (1, 128), (2, 128), (5, 20)])
def test_dense(
    q_len: int, heads: int, on_device: bool, device: torch.device, backend: str, full: bool
):
    if device.type != "cuda" and heads > 20 and not full:
        pytest.skip("needs a GPU: without one, more heads are more of the same")
    call = make(device, MIXED, q_len, heads)
    output, lse = expected(call, lse_base="log2")
    if not on_device:
        call["seq_lens"] = call["seq_lens"].cpu()
    found = trtllm_batch_decode_with_kv_cache_mla(**call, return_lse=True, backend=backend)
    assert found[0].shape == (len(MIXED), q_len, heads, RANK)
    compare(found[0], output)
    torch.testing.assert_close(found[1].double(), lse, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["xqa", "trtllm-gen"])
def test_names_and_buffers_of_other_backends(name: str, device: torch.device):
    call = make(device, MIXED, 2, 16)
    usual = trtllm_batch_decode_with_kv_cache_mla(**call)
    counters = torch.zeros(8, dtype=torch.uint8, device=device)
    found = trtllm_batch_decode_with_kv_cache_mla(
        **call, backend=name, multi_ctas_kv_counter_buffer=counters
    )
    assert torch.equal(found, usual)


def test_options(device: torch.device, backend: str):
    """Sinks, scales, natural logarithms, a destination and a cache of four dimensions."""
    call = make(device, MIXED, 2, 16)
    sinks = torch.linspace(-3, 3, 16, device=device)
    output, lse = expected(call, sinks=sinks, o_scale=0.5, lse_base="ln")
    out = torch.empty(len(MIXED), 2, 16, RANK, dtype=BF16, device=device)
    lse_out = torch.empty(len(MIXED) * 2, 16, device=device)
    call["kv_cache"] = call["kv_cache"][:, None]
    found = trtllm_batch_decode_with_kv_cache_mla(
        **call,
        sinks=[sinks],
        bmm2_scale=0.5,
        out=out,
        lse=lse_out,
        return_lse=True,
        return_lse_base="basee",
        backend=backend,
    )
    assert found[0].data_ptr() == out.data_ptr() and found[1] is lse_out
    compare(out, output)
    torch.testing.assert_close(lse_out.double(), lse, atol=2e-3, rtol=0)


def test_ragged_queries(device: torch.device, backend: str):
    q_lens = (3, 1, 0, 4, 2)
    call = make(device, MIXED, 1, 20)
    call["query"] = randn((sum(q_lens), 20, RANK + ROPE), BF16, device, 1)
    output, _ = expected({**call, "query": call["query"][:, None]}, qo_indptr=indptr(q_lens))
    first = indptr(q_lens).to(device)
    found = trtllm_batch_decode_with_kv_cache_mla(
        **call, cum_seq_lens_q=first, max_q_len=4, backend=backend
    )
    compare(found, output)


@pytest.mark.parametrize("given", ["seq_lens", "sparse_mla_top_k_lens"])
def test_sparse(given: str, device: torch.device, backend: str):
    """Each query token attends to tokens of its own."""
    q_len, top_k = 2, 256
    call = make(device, MIXED, q_len, 128 if device.type == "cuda" else 16)
    tokens = len(MIXED) * q_len
    slots = call["kv_cache"].shape[0] * 64
    chosen = torch.stack([torch.randperm(slots)[:top_k] for _ in range(tokens)]).int()
    seen = torch.tensor([n - q_len + 1 + i for n in MIXED for i in range(q_len)])
    if given == "sparse_mla_top_k_lens":
        seen = torch.randint(0, top_k + 1, (tokens,))
        call |= {given: seen.int().to(device), "seq_lens": None}
    seen = seen.clamp(0, top_k).int()
    output, _ = expected(
        {**call, "seq_lens": seen, "kv_cache": call["kv_cache"].flatten(0, 1)},
        kv_indices=chosen.flatten().to(device),
        kv_indptr=torch.arange(tokens + 1) * top_k,
        qo_indptr=torch.arange(tokens + 1),
        causal=False,
    )
    call["block_tables"] = chosen.view(len(MIXED), q_len, top_k).to(device)
    found = trtllm_batch_decode_with_kv_cache_mla(**call, sparse_mla_top_k=top_k, backend=backend)
    compare(found, output)


def scaled_tokens(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache in tokens of 656 bytes, and what it says."""
    latent = cache[..., :RANK].float().unflatten(-1, (4, 128))
    latent = latent * torch.tensor([1.0, 3.0, 0.01, 5.0], device=cache.device)[:, None]
    scales = latent.abs().amax(-1) / 448
    values = (latent / scales[..., None]).to(torch.float8_e4m3fn)
    parts = [values.flatten(-2), scales, cache[..., RANK:]]
    raw = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    plain = torch.cat([(values.float() * scales[..., None]).flatten(-2), cache[..., RANK:]], -1)
    return raw, plain


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("q_len", "heads"), [(1, 16), (2, 128)])
def test_tokens_with_scales(sparse: bool, q_len: int, heads: int, device: torch.device, full: bool):
    need_hopper(device)
    if device.type != "cuda" and heads > 16 and not full:
        pytest.skip("needs a GPU: without one, more heads are more of the same")
    call = make(device, MIXED, q_len, heads)
    raw, plain = scaled_tokens(call["kv_cache"])
    call["bmm1_scale"] *= 0.2
    changes: dict[str, Any] = {}
    if sparse:
        tokens, top_k = len(MIXED) * q_len, 192
        slots = raw.shape[0] * 64
        chosen = torch.stack([torch.randperm(slots)[:top_k] for _ in range(tokens)]).int()
        seen = torch.tensor([n - q_len + 1 + i for n in MIXED for i in range(q_len)])
        changes = {
            "kv_indices": chosen.flatten().to(device),
            "kv_indptr": torch.arange(tokens + 1) * top_k,
            "qo_indptr": torch.arange(tokens + 1),
            "kv_len_arr": seen.clamp(0, top_k),
            "causal": False,
        }
        call |= {"block_tables": chosen.view(-1, q_len, top_k).to(device), "sparse_mla_top_k": 192}
    flat = plain.flatten(0, 1) if sparse else plain
    output, _ = expected({**call, "kv_cache": flat}, **changes)
    found = trtllm_batch_decode_with_kv_cache_mla(**{**call, "kv_cache": raw})
    compare(found, output, 0.01)  # keys and values are rounded to bfloat16, too


def test_fewer_arguments(device: torch.device):
    need_hopper(device)
    call = make(device, MIXED, 1, 16)
    found = xqa_batch_decode_with_kv_cache_mla(**call)
    assert torch.equal(found, trtllm_batch_decode_with_kv_cache_mla(**call))


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_pages(device: torch.device, backend: str):
    call = make(device, (2000, 1, 64, 500), 1, 128)
    out = torch.empty(4, 1, 128, RANK, dtype=BF16, device=device)
    trtllm_batch_decode_with_kv_cache_mla(**call, out=out, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trtllm_batch_decode_with_kv_cache_mla(**call, out=out, backend=backend)
    for lengths in ((5, 5, 5, 5), (2000, 1990, 1980, 100), (0, 0, 1, 2047)):
        call["seq_lens"].copy_(torch.tensor(lengths))
        call["block_tables"].copy_(call["block_tables"].flip(1))
        graph.replay()
        compare(out, expected(call)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("warm_up", ["none", "elsewhere", "few", "many"])
@pytest.mark.parametrize("captured", ["few", "many"])
def test_a_capture_plans_as_no_call_before(
    captured: str, warm_up: str, device: torch.device, backend: str
):
    """Few requests are planned by the kernel, many by a launch, and so are those of a workspace
    that is used for the first time."""
    calls = {"few": (2000, 1, 64, 500), "many": tuple(i * 37 % 900 for i in range(140))}
    calls = {name: make(device, lengths, 1, 16) for name, lengths in calls.items()}
    calls["elsewhere"] = dict(calls["few"])
    calls["many"]["workspace_buffer"] = calls["few"]["workspace_buffer"].clone()
    calls["few"]["workspace_buffer"] = calls["many"]["workspace_buffer"]
    if warm_up != "none":
        trtllm_batch_decode_with_kv_cache_mla(**calls[warm_up], backend=backend)
    call = calls[captured]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trtllm_batch_decode_with_kv_cache_mla(**call, backend=backend)
    for _ in range(2):
        call["seq_lens"].copy_(call["seq_lens"].roll(1))
        graph.replay()
        compare(out, expected(call)[0])


@pytest.mark.gpu
def test_a_capture_may_free_a_plan(device: torch.device, backend: str):
    """The collector may end a wrapper while a graph is captured, which must not end the capture."""
    call = make(device, MIXED, 1, 16)
    call["seq_lens"] = call["seq_lens"].cpu()
    wrapper = BatchMLAPagedAttentionWrapper(call["workspace_buffer"], backend=backend)
    pages = call["block_tables"].shape[1]
    first = torch.arange(len(MIXED) + 1, dtype=torch.int32)
    wrapper.plan(
        *(first, first * pages, call["block_tables"].flatten(), call["seq_lens"]),
        *(16, RANK, ROPE, 64, True, call["bmm1_scale"], BF16, BF16),
    )
    x, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del wrapper
        x += 1
    graph.replay()
    assert x.item() == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", lambda t: t[..., :-8]),
        ("query", lambda t: t.float()),
        ("kv_cache", lambda t: t.float()),
        ("kv_cache", lambda t: t[:, :, None].expand(-1, -1, 2, -1)),
        ("block_tables", lambda t: t.long()),
        ("block_tables", lambda t: t[1:]),
        ("seq_lens", lambda t: t.long()),
        ("seq_lens", lambda t: t[1:]),
        ("bmm1_scale", lambda t: -1.0),
        ("kv_lora_rank", lambda t: 384),
        ("workspace_buffer", lambda t: t[:1000]),
        ("out", lambda t: torch.empty(1, device="cpu")),
        ("sinks", lambda t: torch.zeros(3)),
        ("enable_dcp", lambda t: True),
        ("backend", lambda t: "trtllm"),
        ("max_q_len", lambda t: 0),
        ("sparse_mla_top_k", lambda t: 7),
        ("cum_seq_lens_q", lambda t: torch.zeros(6, dtype=torch.int32)),
    ],
)
def test_refusals(name: str, value: Any, device: torch.device):
    need_hopper(device)
    if device.type != "cuda" and name in ("workspace_buffer", "sinks"):
        pytest.skip("the reference needs no workspace")
    call = make(device, (70, 64), 1, 16)
    with pytest.raises(
        (TypeError, ValueError),
        match=f"`{name}`|`kv_data_type`|`q_data_type`|`query`|`block_tables`|head_dim_ckv",
    ):
        trtllm_batch_decode_with_kv_cache_mla(**{**call, name: value(call.get(name))})


@pytest.mark.parametrize("spoil", [torch.Tensor.long, lambda t: t[1:]])
def test_lengths_that_others_replace_are_checked(spoil: Any, device: torch.device):
    need_hopper(device)
    call = make(device, (70, 64), 1, 16)
    chosen = torch.zeros(2, 1, 8, dtype=torch.int32, device=device)
    counts = torch.tensor([8, 3], dtype=torch.int32, device=device)
    call |= {"block_tables": chosen, "sparse_mla_top_k": 8, "sparse_mla_top_k_lens": counts}
    assert trtllm_batch_decode_with_kv_cache_mla(**call).isfinite().all()
    with pytest.raises(ValueError, match="`seq_lens`"):
        trtllm_batch_decode_with_kv_cache_mla(**{**call, "seq_lens": spoil(call["seq_lens"])})
