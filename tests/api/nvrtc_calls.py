"""A program: calls of one family, in a process where NVRTC alone compiles.

    python -m tests.api.nvrtc_calls FAMILY CACHE

It ends with a line that says whether the results were right, after a traceback where not. What a
failing kernel leaves on the GPU ends with the process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import flashinfer
from tests.linear_attention import test_gated_delta_rule_prefill, test_ssd_combined
from tests.mla import batches, test_mqa_logits


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = (found.double() - expected).abs().max().item()
    largest = expected.abs().max().item()
    assert error <= bound * largest, f"an error of {error}, the largest number is {largest}"


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def norms_and_activations() -> None:
    """With a graph, whose kernels are launched by another path of the driver."""
    x, w = rows(9, 4096), rows(4096)

    def normed() -> torch.Tensor:
        wide = x.double()
        return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()

    close(flashinfer.rmsnorm(x, w), normed(), 2**-8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashinfer.rmsnorm(x, w)
    x.copy_(torch.randn(9, 4096))
    graph.replay()
    close(captured, normed(), 2**-8)
    gate, up = x.double().chunk(2, dim=-1)
    close(flashinfer.silu_and_mul(x), gate * gate.sigmoid() * up, 2**-8)


def pages() -> None:
    lengths = torch.tensor([5, 0, 3], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 4, 4, 6], dtype=torch.int32, device="cuda")
    batch, positions = flashinfer.get_batch_indices_positions(offsets, lengths, 6)
    assert batch.tolist() == [0, 0, 0, 0, 2, 2] and positions.tolist() == [1, 2, 3, 4, 1, 2]


def sampling() -> None:
    """The tokens that are larger than the one drawn have less than top-p together."""
    logits = 4 * torch.randn(64, 32000, device="cuda")
    probs = flashinfer.softmax(logits, temperature=0.7)
    close(probs, (logits.double() / 0.7).softmax(-1), 2**-16)
    tokens = flashinfer.top_p_sampling_from_probs(probs, 0.5).long()[:, None]
    larger = torch.where(probs > probs.gather(1, tokens), probs, 0).double().sum(-1)
    assert larger.max() <= 0.5 + 1e-4 and len(tokens.unique()) > 1, larger.max()


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """One request in float64; query i sees the keys before number first + i."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    keys, queries = (torch.arange(len(x), device=q.device) for x in (k, q))
    seen = keys < first + queries[:, None]
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


def decode() -> None:
    """On both tiles of few rows."""
    sizes = [1, 40, 700]
    counts = [-(-size // 16) for size in sizes]
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    cache, numbers = rows(sum(counts), 2, 16, 8, 128), torch.randperm(sum(counts)).int().cuda()
    last = torch.tensor([(size - 1) % 16 + 1 for size in sizes]).int()
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    for heads in (32, 128):
        wrapper.plan(indptr, numbers, last, heads, 8, 128, 16, q_data_type=torch.bfloat16)
        q = rows(3, heads, 128)
        out = wrapper.run(q, cache)
        for i, size in enumerate(sizes):
            own = cache[numbers[indptr[i] : indptr[i + 1]].long()]
            k, v = (own[:, j].flatten(0, 1)[:size] for j in (0, 1))
            close(out[i : i + 1], attended(q[i : i + 1], k, v, size), 2**-6)


def prefill() -> None:
    """The kernel for Hopper reads and writes by tensor maps, rows and pages."""
    lengths = [(300, 300), (130, 1500), (1, 64)]
    queries, keys = (batches.indptr(sizes) for sizes in zip(*lengths, strict=True))
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
    num_keys = int(keys[-1])
    q, k, v = rows(int(queries[-1]), 32, 128), rows(num_keys, 8, 128), rows(num_keys, 8, 128)
    ragged.plan(queries, keys, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
    parts = [(slice(*queries[i : i + 2]), slice(*keys[i : i + 2])) for i in range(3)]
    expected = [attended(q[i], k[j], v[j], len(k[j]) - len(q[i]) + 1) for i, j in parts]
    close(ragged.run(q, k, v), torch.cat(expected), 2**-6)

    starts = batches.indptr([-(-n // 16) for _, n in lengths])
    num_pages = int(starts[-1])
    pages, cache = torch.randperm(num_pages).int().cuda(), rows(num_pages, 2, 16, 8, 128)
    for i, (_, part) in enumerate(parts):
        own = pages[starts[i] : starts[i + 1]].long()
        for which, x in enumerate((k[part], v[part])):
            whole = cache[own, which].flatten(0, 1)
            whole[: len(x)] = x
            cache[own, which] = whole.view(-1, 16, 8, 128)
    last = torch.tensor([(n - 1) % 16 + 1 for _, n in lengths]).int()
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa3")
    dtype = torch.bfloat16
    paged.plan(queries, starts, pages, last, 32, 8, 128, 16, causal=True, q_data_type=dtype)
    close(paged.run(q, cache), torch.cat(expected), 2**-6)


def products() -> None:
    """Clusters of two CTAs share the boxes of large matrices on Hopper."""
    a, b = rows(2048, 512), rows(4096, 512)
    close(flashinfer.mm_bf16(a, b.T, backend="tinygemm"), a.double() @ b.double().T, 2**-7)


def latent() -> None:
    """The kernel for Hopper loads latent caches by tensor maps."""
    batches.default_backend = "fa3"
    batch = batches.Batch((1, 2, 1), (700, 64, 129), 16, causal=True)
    device = torch.device("cuda")
    wrapper = batches.make_wrapper(device)
    batch.plan(wrapper)
    batches.check(wrapper, **batch.arguments(device), return_lse=True)


def chunks() -> None:
    """The gated delta rule over packed sequences."""
    case = test_gated_delta_rule_prefill.CASES[0]
    test_gated_delta_rule_prefill.test_against_the_recurrence(torch.device("cuda"), case)


def mamba() -> None:
    """Mamba-2 over packed sequences."""
    case = test_ssd_combined.CASES[0]
    test_ssd_combined.test_against_the_recurrence(torch.device("cuda"), case)


def indexer() -> None:
    """The scores of sparse attention over pages."""
    test_mqa_logits.test_paged(torch.device("cuda"), [1, 64, 300, 5000], 1, 64, 64)


BF16 = "bf16_bf16_bf16_qk128_vo128"
FAMILIES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "norms_and_activations": (
        norms_and_activations,
        (
            "norm_dtype_bf16_out_dtype_bf16_subtract_mean_0_add_residual_0",
            "act_and_mul_activation_silu_dtype_bf16",
        ),
    ),
    "pages": (pages, ("page",)),
    "sampling": (
        sampling,
        (
            "sampling_dtype_f32_out_dtype_f32_logits_1_filter_kNone_output_kProbs",
            "sampling_dtype_f32_out_dtype_f32_logits_0_filter_kTopP_output_kToken",
        ),
    ),
    "decode": (
        decode,
        (
            "attention_plan",
            f"attention_{BF16}_tile8_paged",
            f"attention_{BF16}_tile16_paged",
        ),
    ),
    "prefill": (
        prefill,
        (
            "attention_plan",
            f"attention_{BF16}_tile128_ragged_causal_fa3",
            f"attention_{BF16}_tile128_paged_causal_fa3",
        ),
    ),
    "products": (
        products,
        ("gemm_dtype_a_bf16_dtype_b_bf16_dtype_out_bf16_tile_rows_128_*_groups_batch_*",),
    ),
    "latent": (
        latent,
        ("mla_plan", "batch_mla_backend_fa3_dtype_q_bf16_dtype_kv_bf16_*"),
    ),
    "chunks": (chunks, ("chunk_delta_rule_dtype_bf16_state_dtype_f32_head_dim_k_128",)),
    "mamba": (mamba, ("ssd_dtype_bf16_state_dtype_f32_dt_dtype_bf16_dstate_128",)),
    "indexer": (indexer, ("mqa_schedule", "mqa_logits_dtype_out_f32_heads_64_queries_1_paged_1")),
}


def only_nvrtc_compiled(cache: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in cache.rglob("manifest.json")]
    compilers = [manifest["ingredients"]["toolchain"] for manifest in manifests]
    assert compilers and all("host part" in found for found in compilers), compilers


def main(family: str, cache: Path) -> int:
    """Run a family's calls; 1 if they fail."""
    torch.manual_seed(0)
    check, _ = FAMILIES[family]
    try:
        check()
        torch.cuda.synchronize()
        only_nvrtc_compiled(cache)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"{family}: FAILED, {reason}", flush=True)
        return 1
    print(f"{family}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
