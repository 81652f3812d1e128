"""Templates of attention functions that take pages by block tables, planned and run in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._common import checks
from ..template import TraceTemplate
from .attention import by_lse, paged_template, ragged_template
from .attention_arguments import _window

Arguments = Mapping[str, Any]
_INDICES = (torch.int32, torch.int64)


def _pages_of_tables(tables: Any, lengths: torch.Tensor, page_size: int) -> dict[str, torch.Tensor]:
    """The paged form of block tables `[batch_size, max_pages]` for requests of these lengths."""
    counts = (lengths + page_size - 1) // page_size
    needed = int(counts.max()) if len(counts) else 0
    tables = checks.tensor("block_tables", tables, 2)
    if tables.dtype not in _INDICES or len(tables) != len(lengths) or tables.shape[1] < needed:
        raise ValueError(
            f"`block_tables` must be int32 or int64 [{len(lengths)}, at least {needed}] for these "
            f"lengths, got {tables.dtype} {list(tables.shape)}"
        )
    inside = torch.arange(tables.shape[1], device=tables.device) < counts[:, None]
    last = (lengths - (counts - 1) * page_size).clamp(max=page_size)
    return {
        "kv_indptr": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        "kv_indices": tables[inside].int(),
        "kv_last_page_len": last.int(),
    }


def lengths_of(name: str, value: Any) -> torch.Tensor:
    """Tokens of each request in one dimension, from a tensor of any shape."""
    given = checks.tensor(name, value).reshape(-1)
    if given.dtype not in (*_INDICES, torch.uint32):
        raise ValueError(f"`{name}` must have dtype int32, int64 or uint32, got {given.dtype}")
    return given


def check_rows(q: torch.Tensor, tokens: int, batch_size: int) -> None:
    """Refuse queries that are not `tokens` for each request."""
    if len(checks.tensor("q", q, 3)) != tokens * batch_size:
        raise ValueError(
            f"`q` must have {tokens * batch_size} rows, `q_len_per_req` {tokens} for each of "
            f"{batch_size} requests, got {len(q)}"
        )


def check_offsets(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    call: Arguments,
    batch_size: int,
    tokens: int,
) -> None:
    """Refuse ``batch_offsets_*`` of requests that do not follow each other.

    Parameters
    ----------
    caches : tuple of torch.Tensor
        Keys and values, in pages.
    call : mapping
        All arguments of the function, by name.
    tokens : int
        Query tokens of a request.

    Raises
    ------
    TypeError, ValueError
        If offsets are not as described; on a GPU a kernel asserts it, so that no host waits.
    """
    given = {name: call.get(f"batch_offsets_{name}") for name in "qokv"}
    if all(offsets is None for offsets in given.values()):
        return
    out, is_paged = call.get("out"), call.get("block_tables") is not None
    strides = {
        "q": tokens * q.stride(0),
        "o": tokens * (q.shape[1] * caches[1].shape[-1] if out is None else out.stride(0)),
        **{name: None if is_paged else t.stride(0) for name, t in zip("kv", caches, strict=True)},
    }
    for name, offsets in given.items():
        if offsets is not None:
            _check_offsets(f"batch_offsets_{name}", offsets, batch_size, strides[name])


def _check_offsets(name: str, value: Any, batch_size: int, stride: int | None) -> None:
    """Refuse offsets of requests that are not `stride` elements apart; None: any will do."""
    offsets = checks.tensor(name, value).reshape(-1)
    if offsets.dtype not in _INDICES or len(offsets) != batch_size + 1:
        raise ValueError(
            f"`{name}` must be int32 or int64 [{batch_size + 1}] for {batch_size} requests, got "
            f"{offsets.dtype} {list(value.shape)}"
        )
    if stride is None:
        return
    fits = (offsets == torch.arange(batch_size + 1, device=offsets.device) * stride).all()
    rule = f"`{name}` must be those of requests that follow each other, {stride} elements apart"
    if offsets.is_cuda:
        torch._assert_async(fits, rule)
    elif not fits:
        raise ValueError(f"{rule}, got {offsets[:4].tolist()}...")


def _known_lengths(name: str, value: Any, bound_name: str, bound: Any) -> torch.Tensor:
    """The lengths, none of which is above the bound."""
    lengths = lengths_of(name, value).long()
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"`{name}` must not be negative, got {int(lengths.min())}")
    checks.count(bound_name, bound, int(lengths.max()) if len(lengths) else 0)
    return lengths


def _result(arguments: Arguments) -> dict[str, Any]:
    """Dtype of the result."""
    out = arguments.get("out")
    return {"o_dtype": (arguments["q"] if out is None else out).dtype}


def _gather_cudnn_decode(call: Arguments) -> dict[str, Any]:
    q = checks.tensor("q", call["q"], 3)
    k, v = (checks.tensor(name, call[name], 4).transpose(1, 2) for name in ("k_cache", "v_cache"))
    checks.tensor("workspace_buffer", call["workspace_buffer"])
    checks.flag("is_cuda_graph_compatible", call.get("is_cuda_graph_compatible", False))
    tokens = checks.count("q_len_per_req", call.get("q_len_per_req", 1))
    lengths = _known_lengths(
        "actual_seq_lens_kv", call.get("actual_seq_lens_kv"), "max_sequence_kv",
        call["max_sequence_kv"],
    )  # fmt: skip
    tables = call.get("block_tables")
    if tables is None:
        if len(k) != len(lengths):
            raise ValueError(
                "`block_tables` must be given unless each request has one page, got "
                f"{len(k)} pages for {len(lengths)} requests"
            )
        tables = torch.arange(len(lengths), dtype=torch.int32, device=q.device)[:, None]
    check_rows(q, tokens, len(lengths))
    check_offsets(q, (call["k_cache"], call["v_cache"]), call, len(lengths), tokens)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=q.device) * tokens
    window = _window(call.get("window_left", -1))
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "qo_indptr": starts,
        **_pages_of_tables(tables, lengths, k.shape[1]),
        "sm_scale": checks.number("scale", call["scale"]),
        **({} if window < 0 else {"window_left": window}),
        "sinks": call.get("sinks"),
        "causal": True,
        "out": call.get("out"),
        "lse": call.get("lse"),
        **_result(call),
    }


def _template(**properties: Any) -> TraceTemplate:
    template = paged_template(**properties)
    template.hints, template.predict = (), _result
    template.scratch = ("workspace_buffer",)
    return template


def _draw_cudnn_decode(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three requests over pages of four tokens, two queries each."""
    generator = torch.Generator().manual_seed(7)
    device, dtype = arguments["q"].device, arguments["q"].dtype
    half = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float16

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, half)

    tables = torch.tensor([[5, 2], [3, 0], [6, 1]], dtype=torch.int32)
    return {
        "q": values(6, 6, 32),
        "k_cache": values(7, 2, 4, 32),
        "v_cache": values(7, 2, 4, 32),
        "scale": 0.2,
        "workspace_buffer": torch.empty(32 << 20, dtype=torch.uint8, device=device),
        "max_sequence_kv": 8,
        "actual_seq_lens_kv": torch.tensor([7, 4, 8], dtype=torch.int32, device=device),
        "block_tables": tables.to(device),
        "q_len_per_req": 2,
    }


def block_table_template(
    *,
    name: str,
    gather: Callable[[Arguments], dict[str, Any]],
    predict: Callable[[Arguments], dict[str, Any]],
    lse: bool,
) -> TraceTemplate:
    """Template of a function of queries, pages and block tables, which `gather` reads."""
    template = paged_template(
        name=name,
        description="Attention of ragged queries over pages, by block tables.",
        init=lambda arguments: {**_draw_tables(arguments, name), **_returns(lse)},
        gather=gather,
        lse=lse,
    )
    template.predict, template.scratch = predict, ("workspace_buffer",)
    return template


def block_table_trace(**properties: Any) -> Callable[..., TraceTemplate]:
    """The templates of a function that may return log-sum-exps."""
    return by_lse(block_table_template, **properties)


def one_call_ragged_trace(**properties: Any) -> Callable[..., TraceTemplate]:
    """The templates of a function of ragged queries, keys and values."""

    def make(*, predict: Any, lse: bool, **properties: Any) -> TraceTemplate:
        def init(arguments: dict[str, Any]) -> dict[str, Any]:
            return {**_draw_rows(arguments), "return_lse": lse}

        template = ragged_template(init=init, lse=lse, **properties)
        template.predict, template.scratch = predict, ("workspace_buffer",)
        return template

    return by_lse(make, **properties)


def _returns(lse: bool) -> dict[str, Any]:
    return {"return_lse": True} if lse else {}


def _draw_tables(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """As `_draw_cudnn_decode`, under the names of the other functions."""
    drawn = _draw_cudnn_decode(arguments)
    lengths, pages = drawn["actual_seq_lens_kv"], (drawn["k_cache"], drawn["v_cache"])
    if name == "xqa_decode":
        pages = (pages[0].transpose(1, 2), pages[1].transpose(1, 2))
    shared = {
        "query": drawn["q"],
        "kv_cache": pages,
        "workspace_buffer": drawn["workspace_buffer"],
        "block_tables": drawn["block_tables"],
        "seq_lens": lengths,
        "bmm1_scale": 0.2,
        "bmm2_scale": 1.0,
    }
    if name != "trtllm_context":
        return {**shared, "max_seq_len": 8, "q_len_per_req": 2}
    first = torch.arange(4, dtype=torch.int32, device=lengths.device)
    rows = {"cum_seq_lens_q": first * 2, "cum_seq_lens_kv": lengths.new_tensor([0, 7, 11, 19])}
    return {**shared, **rows, "max_q_len": 2, "max_kv_len": 8, "batch_size": 3}


def _draw_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three requests of two, three and one query tokens."""
    drawn = _draw_tables(arguments, "trtllm_context")
    query, generator = drawn["query"], torch.Generator().manual_seed(8)
    keys = torch.randn(2, 19, 2, 32, generator=generator).to(query)
    shared = ("workspace_buffer", "seq_lens", "batch_size", "cum_seq_lens_kv", "bmm1_scale")
    return {
        **{name: drawn[name] for name in (*shared, "bmm2_scale", "max_kv_len", "query")},
        **{"key": keys[0], "value": keys[1], "max_q_len": 3},
        "cum_seq_lens_q": drawn["cum_seq_lens_kv"].new_tensor([0, 2, 5, 6]),
        **{"o_sf_scale": 1.0, "window_left": -1, "enable_pdl": None, "is_causal": True},
    }


cudnn_batch_decode_trace = by_lse(
    lambda *, lse: _template(
        name="cudnn_batch_decode",
        description="Attention of a few queries per request over pages, by block tables.",
        init=lambda arguments: {**_draw_cudnn_decode(arguments), "return_lse": lse},
        gather=_gather_cudnn_decode,
        lse=lse,
    )
)
