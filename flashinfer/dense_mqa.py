"""Scores by which sparse attention chooses tokens, with a range of keys for each query.

The same scores as in `flashinfer.attn_scores`, for the queries of a prefill: keys lie one after the
other, and query i sees those from ``ks[i]`` to ``ke[i] - 1``.
"""

import torch

from ._common import checks
from ._indexer.launch import ragged_logits
from ._instrument.decorator import flashinfer_api
from .trace.templates.mqa_logits import fp8_mqa_logits_trace

__all__ = ["fp8_mqa_logits"]


@flashinfer_api(trace=fp8_mqa_logits_trace)
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int = 0,
    *,
    sm_count: int | None = None,
) -> torch.Tensor:
    """``logits[i, p] = scale[p] * sum_h weights[i, h] * relu(q[i, h] k[p])``, on Hopper.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_queries, num_heads, 128]``, float8_e4m3fn, the last two dimensions contiguous,
        queries at multiples of 16 bytes; 8, 16, 32, 64 or 128 heads.
    kv : tuple of torch.Tensor
        Keys ``[num_keys, 128]`` float8_e4m3fn, rows at multiples of 16 bytes, and their scales
        ``[num_keys]`` float32.
    weights : torch.Tensor
        ``[num_queries, num_heads]`` float32, rows contiguous and at multiples of 16 bytes.
    ks, ke : torch.Tensor
        ``[num_queries]`` int32: the first key that a query sees, and the one after the last.
    clean_logits : bool
        Keys that a query does not see have minus infinity either way.
    max_seqlen_k : int
        0: the result has a column for each key.
    sm_count : int, optional
        Not supported: None.

    Returns
    -------
    torch.Tensor
        ``[num_queries, num_keys]`` float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.
    """
    checks.tensor("q", q, 3)
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise TypeError(f"`kv` must be a pair of keys and scales, got {type(kv).__name__}")
    keys, scales = kv
    checks.tensor("kv", keys, 2)
    checks.flag("clean_logits", clean_logits)
    if max_seqlen_k or sm_count is not None:
        raise ValueError("`max_seqlen_k` must be 0 and `sm_count` None: not supported")
    shape = (q.shape[0], keys.shape[0])
    out = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    ragged_logits(q, keys, scales, weights, ks, ke, out)
    return out
