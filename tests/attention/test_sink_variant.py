"""The ready source of sinks as a user's variant, against float32."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.jit.attention.variants import attention_sink_decl

pytestmark = pytest.mark.gpu


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Causal attention of one request in float32, with one more logit per head."""
    group = q.shape[1] // k.shape[1]
    q = q.float().transpose(0, 1)
    k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    logits = q @ k.transpose(1, 2) * sm_scale
    rows, columns = logits.shape[1:]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    logits = logits.masked_fill(~seen, -math.inf)
    column = sink[:, None, None].expand(-1, rows, 1)
    return (torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v).transpose(0, 1)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_the_variant_is_attention_with_sinks(backend: str):
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 runs on Hopper")
    dtype, heads, kv_heads, head_dim = torch.bfloat16, 8, 2, 128
    jit_args = [f"sink_{backend}", *[dtype] * 3, torch.int32, head_dim, head_dim]
    jit_args += [["sink"], ["float"], ["sm_scale"], ["double"]]
    jit_args += ["AttentionSink", attention_sink_decl[backend]]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), backend=backend, jit_args=jit_args
    )
    bounds = torch.tensor([0, 100, 250], dtype=torch.int32)
    wrapper.plan(bounds, bounds, heads, kv_heads, head_dim, causal=True, q_data_type=dtype)
    q = torch.randn(250, heads, head_dim, dtype=dtype, device="cuda")
    k, v = (torch.randn(250, kv_heads, head_dim, dtype=dtype, device="cuda") for _ in range(2))
    sink, sm_scale = torch.randn(heads, device="cuda") * 3, 0.1
    out = wrapper.run(q, k, v, sink, sm_scale)
    for start, end in ((0, 100), (100, 250)):
        part = slice(start, end)
        wanted = expected(q[part], k[part], v[part], sink, sm_scale)
        torch.testing.assert_close(out[part].float(), wanted, atol=2e-2, rtol=2e-2)
