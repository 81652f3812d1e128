"""Long requests with a fixed split: bit for bit the same alone and as the first ones of a batch."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from tests.attention.batches import need_backend

HEAD_DIM, PAGE = 128, 16


def _run(
    backend: str, group: int, requests: list[tuple[int, int]], pages: torch.Tensor, split: int
) -> list[torch.Tensor]:
    """Outputs of requests of (queries, keys), each of which reads its own rows of `pages`."""
    device = pages.device
    counts = [-(-keys // PAGE) for _, keys in requests]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), backend=backend
    )
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
    first = torch.tensor([0, *counts]).cumsum(0).int()
    numbers = torch.cat([torch.arange(n) + 400 * i for i, n in enumerate(counts)]).int()
    last = torch.tensor(
        [keys - (n - 1) * PAGE for (_, keys), n in zip(requests, counts, strict=True)]
    ).int()
    wrapper.plan(
        *(starts, first, numbers.to(device), last, group, 1, HEAD_DIM, PAGE),
        causal=True,
        q_data_type=torch.bfloat16,
        fixed_split_size=split,
    )
    queries = []
    for i, (count, _) in enumerate(requests):
        generator = torch.Generator().manual_seed(i)
        queries.append(torch.randn(count, group, HEAD_DIM, generator=generator))
    q = torch.cat(queries).to(device, torch.bfloat16)
    return list(wrapper.run(q, pages).split([count for count, _ in requests]))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("qo_len", [128, 256])
@pytest.mark.parametrize("split", [2048, 512])
def test_the_first_requests_of_a_batch(
    backend: str, group: int, qo_len: int, split: int, device: torch.device
):
    need_backend(backend, device)
    pages = torch.randn(8 * 400, 2, PAGE, 1, HEAD_DIM, device=device).bfloat16()
    lengths = (2048, 2049, 3000, 4096, 4097, 5000, 2500, 3333)
    requests = [(qo_len, keys) for keys in lengths]
    together = _run(backend, group, requests, pages, split)
    for count in (1, 2, 5):
        fewer = _run(backend, group, requests[:count], pages, split)
        for i in range(count):
            assert torch.equal(fewer[i], together[i]), f"request {i} of {count}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("window_left", [-1, 650])
@pytest.mark.parametrize("plan", [{"fixed_split_size": 64}, {"fixed_split_size": 512}])
def test_parts_of_a_prompt(
    plan: dict[str, int], window_left: int, backend: str, device: torch.device
):
    """A token has the same bits in a prompt of any length."""
    need_backend(backend, device)
    queries, keys = 150, 1500
    pages = torch.randn(-(-keys // PAGE), 2, PAGE, 2, HEAD_DIM, device=device).bfloat16()
    q = torch.randn(queries, 8, HEAD_DIM, device=device).bfloat16()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), backend=backend
    )

    def run(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv_len = keys - queries + end
        count = -(-kv_len // PAGE)
        wrapper.plan(
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([0, count], dtype=torch.int32),
            torch.arange(count, dtype=torch.int32, device=device),
            torch.tensor([kv_len - (count - 1) * PAGE], dtype=torch.int32),
            *(8, 2, HEAD_DIM, PAGE),
            causal=True,
            window_left=window_left,
            q_data_type=torch.bfloat16,
            **plan,
        )
        return wrapper.run(q[begin:end], pages, return_lse=True)

    whole = run(0, queries)
    for begin, end in ((0, 1), (1, 38), (38, 101), (101, 150), (77, 78)):
        for part, all_of_it in zip(run(begin, end), whole, strict=True):
            assert torch.equal(part, all_of_it[begin:end]), f"tokens {begin} to {end}"
