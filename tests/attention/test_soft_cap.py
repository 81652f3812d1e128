"""Soft caps of logits near to it and far from it: how far log-sum-exps are from exact."""

from __future__ import annotations

import pytest
import torch

from tests.attention.batches import BF16, Batch, need_backend, plan_decode, plan_ragged, ragged_kv

pytestmark = pytest.mark.gpu

LOG2E = 1.4426950408889634


def exact_lse(q: torch.Tensor, k: torch.Tensor, cap: float, scale: float) -> torch.Tensor:
    """``[tokens, heads]`` base 2 of one causal request, in double precision."""
    group = q.shape[1] // k.shape[1]
    q, k = q.double(), k.double().repeat_interleave(group, 1)
    logits = cap * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) * scale / cap)
    hidden = torch.ones(logits.shape[1:], device=q.device).tril(len(k) - len(q)) == 0
    return logits.masked_fill(hidden, -torch.inf).logsumexp(2).T * LOG2E


@pytest.mark.parametrize("spread", [0.3, 4.0, 30.0])
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0, 1e4])
def test_prefill(cap, spread, backend, device):
    need_backend(backend, device)
    batch = Batch((300,), (500,))
    q, (k, v) = batch.query(device) * spread, ragged_kv(batch, device)
    plan = {"causal": True, "logits_soft_cap": cap, "sm_scale": 0.1}
    _, lse = plan_ragged(batch, device, backend, **plan).run(q, k, v, return_lse=True)
    # 1.2e-5 of the cap in each logit, and the rounding of products of that size. Logits that are
    # small against the cap are hardly changed.
    most = min(cap, 10 * spread)
    allowed = 1.3e-5 * most * LOG2E + 4e-6 * most
    torch.testing.assert_close(
        lse.double(), exact_lse(q, k, cap, 0.1), rtol=2e-6, atol=allowed + 2e-5
    )


def test_decode(device):
    batch = Batch((1,), (900,), page_size=1)
    q, cache = batch.query(device) * 20.0, batch.cache(device)
    wrapper = plan_decode(batch, device, logits_soft_cap=30.0, sm_scale=0.1)
    _, lse = wrapper.run(q, cache, return_lse=True)
    _, pages, _, _ = batch.table()
    k = cache[0][pages.long().to(device), 0]
    expected = exact_lse(q, k, 30.0, 0.1)
    torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=1.3e-5 * 30 * LOG2E + 2e-5)


def test_rows_do_not_depend_on_the_warps_other_rows(device):
    """A request whose logits are all near the cap has its bits beside one whose are not."""
    need_backend("fa3", device)
    q = torch.randn(40, 8, 128, device=device, dtype=BF16)
    k, v = (torch.randn(40, 2, 128, device=device, dtype=BF16) for _ in range(2))
    plan = {"causal": True, "logits_soft_cap": 30.0}
    results = []
    for spread in (1.0, 100.0):
        scaled = q.clone()
        scaled[20:] *= spread
        batch = Batch((20, 20), (20, 20))
        results.append(plan_ragged(batch, device, "fa3", **plan).run(scaled, k, v)[:20])
    assert torch.equal(*results)
