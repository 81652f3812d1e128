"""What functions that ranks call together return, for ``torch.compile``.

Each takes the arguments by name, whose tensors may have no values, and gives tensors like results.
Workspaces are no written arguments: their memory is the ranks', and a graph neither copies nor
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import patterns
from .comm_backend import resolve_backend
from .fusion_names import AllReduceFusionPattern

Arguments = Mapping[str, Any]

FUSION_OUTPUTS = ("residual_out", "norm_out", "quant_out", "scale_out")
"""Parameters of the fused all-reduces that are written."""


def _given(arguments: Arguments, name: str, like: torch.Tensor, shape: Any) -> torch.Tensor:
    given = arguments[name]
    if given is not None:
        return given
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def gather_results(arguments: Arguments) -> torch.Tensor:
    """The result of `all_gather`."""
    x, ranks = arguments["input"], arguments["workspace"].world_size
    shape = (ranks * x.shape[0], *x.shape[1:]) if x.ndim else (ranks,)
    return _given(arguments, "output", x, shape)


def scatter_results(arguments: Arguments) -> torch.Tensor:
    """The result of `reduce_scatter`."""
    x, ranks = arguments["input"], arguments["workspace"].world_size
    return _given(arguments, "output", x, (x.shape[0] // ranks, *x.shape[1:]))


def gather_matmul_results(arguments: Arguments) -> torch.Tensor:
    """The result of `all_gather_matmul`."""
    x, ranks = arguments["inp"], resolve_backend(None, arguments["group"]).Get_size()
    shape = (ranks * x.shape[0], arguments["w"].shape[1])
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def quantized_results(arguments: Arguments) -> torch.Tensor:
    """The result of `quantized_all_reduce`."""
    return _given(arguments, "output", arguments["inp"], arguments["inp"].shape)


def fusion_results(arguments: Arguments) -> torch.Tensor:
    """The result of `allreduce_fusion`."""
    pattern = patterns.pattern_of(arguments["pattern"])
    if pattern == AllReduceFusionPattern.kAllReduce:
        return _given(arguments, "output", arguments["input"], arguments["input"].shape)
    given = patterns.Outputs(*(arguments[name] for name in ("output", *FUSION_OUTPUTS)))
    layout = patterns.layout_of(arguments["layout_code"])
    made = patterns.made(pattern, given, arguments["residual_in"], layout)
    result = made.quant_out if made.norm_out is None else made.norm_out
    assert result is not None
    return result


def exchange_results(arguments: Arguments) -> Any:
    """The results of `decode_cp_a2a_alltoall`."""
    if arguments["out"] is not None:
        return tuple(arguments["out"])
    inputs = (arguments["partial_o"], arguments["softmax_stats"])
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def lse_reduce_results(arguments: Arguments) -> torch.Tensor:
    """The result of `decode_cp_a2a_lse_reduce`."""
    partial = arguments["partial_o"]
    shape = (*partial.shape[:-2], partial.shape[-1])
    return torch.empty(shape, dtype=partial.dtype, device=partial.device)


def combine_results(arguments: Arguments) -> torch.Tensor:
    """The result of `moe_a2a_combine`."""
    payload, output = arguments["payload"], arguments["output"]
    if output is not None:
        return output
    shape = (arguments["local_num_tokens"], payload.shape[2])
    return payload.new_empty(shape, dtype=arguments["output_dtype"] or payload.dtype)


def pack_results(arguments: Arguments) -> torch.Tensor:
    """The result of `pack_ulysses_qkv_head_chunk`."""
    query = arguments["query"]
    heads = arguments["world_size"] * arguments["head_count"]
    return _given(arguments, "out", query, (*query.shape[:2], heads, 3 * query.shape[3]))


def merge_results(arguments: Arguments) -> torch.Tensor:
    """The result of `merge_ulysses_output_head_chunk`, which is `out`."""
    return arguments["out"]
