"""Attention with each option beside the plain call in the same run: what an option costs.

``python benchmarks/flashinfer_benchmark.py --options`` prints the table. Unless a row says
otherwise, prefill is causal, 4 x 4096 tokens (2 with a custom mask), decode 64 x 4096, with 32
query heads, 8 KV heads of 128, bfloat16. A call is timed alone, as a CUDA graph: the best of
several rounds. Where the two calls of a row differ in products or bytes, their ratio is that per
product or byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

import flashinfer

Call = Callable[[], Any]
BF16, E4M3, PACKED = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
HEADS, HEAD_DIMS = (32, 8), (128, 128)
PAGE_SIZE = 16
ROUNDS, CALLS = 5, 10
WORKSPACE_BYTES = 384 << 20


class Option(NamedTuple):
    """How a call is made.

    Attributes
    ----------
    kind : str
        A key of ``MAKERS``.
    plan : dict
        Options of ``plan``.
    make : dict
        Arguments of the maker.
    """

    kind: str
    plan: dict[str, Any]
    make: dict[str, Any]


class Row(NamedTuple):
    """A call with an option, and what it is compared with.

    Attributes
    ----------
    option, plain : Option
        The calls.
    most : float, optional
        The most that the ratio of their times may be.
    work : float
        Products or bytes of the first, as a multiple of the second's.
    """

    option: Option
    plain: Option
    most: float | None = None
    work: float = 1.0


# ---- Calls ----


def _prefill(
    device: str,
    plan: dict[str, Any],
    *,
    backend: str = "auto",
    page_size: int = 0,
    batch_size: int = 4,
    length: int = 4096,
    queries: int = 0,
    mask: str = "causal",
    heads: tuple[int, int] = HEADS,
    head_dims: tuple[int, int] = HEAD_DIMS,
    return_lse: bool = False,
) -> Call:
    """`queries` of each request, if fewer than its keys; `mask`: causal, none or of ``MASKS``."""
    queries = queries or length
    q_starts, starts = _starts([queries] * batch_size), _starts([length] * batch_size)
    (q_heads, kv_heads), (dim_qk, dim_vo) = heads, head_dims
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    q = torch.randn(batch_size * queries, q_heads, dim_qk, device=device, dtype=BF16)
    if mask in MASKS:
        plan = {**plan, **MASKS[mask](device, batch_size, queries, length)}
    options = {"causal": mask in ("causal", "items"), "q_data_type": BF16, **plan}
    options["head_dim_vo"] = dim_vo
    if page_size == 0:
        k, v = (
            torch.randn(batch_size * length, kv_heads, dim, device=device, dtype=BF16)
            for dim in head_dims
        )
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        ragged.plan(q_starts, starts, q_heads, kv_heads, dim_qk, **options)
        return lambda: ragged.run(q, k, v, return_lse=return_lse)
    table = _table([length] * batch_size, page_size, device)
    cache = _cache((len(table[1]), 2, page_size, kv_heads), dim_qk, BF16, device)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
    paged.plan(q_starts, *table, q_heads, kv_heads, dim_qk, page_size, **options)
    return lambda: paged.run(q, *cache.values(), return_lse=return_lse)


def _decode(
    device: str,
    plan: dict[str, Any],
    *,
    backend: str = "auto",
    batch_size: int = 64,
    length: int = 4096,
    mixed: bool = False,
    head_dim: int = 128,
    on_device: bool = False,
) -> Call:
    """`mixed` lengths are from an eighth of `length` to the double; `on_device`: not planned."""
    lengths = [length * (1 + 5 * i % 16) // 8 if mixed else length for i in range(batch_size)]
    q_heads, kv_heads = HEADS
    dtypes = {"q_data_type": BF16, "kv_data_type": BF16, **plan}
    table = _table(lengths, PAGE_SIZE, device)
    shape = (len(table[1]), 2, kv_heads, PAGE_SIZE)
    cache = _cache(shape, head_dim, dtypes["kv_data_type"], device)
    rows = batch_size * plan.get("q_len_per_req", 1)
    q = torch.randn(rows, q_heads, head_dim, device=device, dtype=BF16)
    q = q.to(dtypes["q_data_type"])
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if on_device:
        counts = table[0].diff().tolist()
        pages = torch.nn.utils.rnn.pad_sequence(table[1].split(counts), batch_first=True)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        return lambda: flashinfer.decode.xqa_batch_decode_with_kv_cache(
            *(q, cache["paged_kv_cache"], workspace, pages, seq_lens, max(lengths)),
            bmm1_scale=head_dim**-0.5,
            kv_layout="HND",
        )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
    wrapper.plan(*table, q_heads, kv_heads, head_dim, PAGE_SIZE, **dtypes)
    return lambda: wrapper.run(q, **cache)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _table(
    lengths: Sequence[int], page_size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every page in a random place."""
    indptr = _starts([-(-n // page_size) for n in lengths])
    pages = torch.randperm(int(indptr[-1])).int().to(device)
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32)
    return indptr, pages, last


def _cache(
    shape: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    """Keys and values, of 4 bits with their scales, by the names that ``run`` has for them."""
    if dtype is not PACKED:
        return {
            "paged_kv_cache": torch.randn(*shape, head_dim, device=device, dtype=BF16).to(dtype)
        }
    codes = torch.randint(0, 256, (*shape, head_dim // 2), dtype=PACKED, device=device)
    scales = torch.rand(*shape, head_dim // 16, device=device).to(E4M3)
    return {"paged_kv_cache": codes, "kv_cache_sf": scales}


# ---- Masks: options of plan ----


def _lower(device: str, batch_size: int, queries: int, length: int) -> dict[str, Any]:
    lower = torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)
    return {"custom_mask": lower.flatten().repeat(batch_size)}


def _tree(device: str, batch_size: int, queries: int, length: int) -> dict[str, Any]:
    """The last tokens are a binary tree of drafts: each sees its ancestors, and what is before."""
    tree = torch.eye(queries, dtype=torch.bool)
    for token in range(1, queries):
        tree[token] |= tree[(token - 1) // 2]
    seen = torch.cat([torch.ones(queries, length - queries, dtype=torch.bool), tree], 1)
    return {"custom_mask": seen.to(device).flatten().repeat(batch_size)}


def _items(device: str, batch_size: int, queries: int, length: int) -> dict[str, Any]:
    """Half is a common prefix, then there are 16 items, a delimiter before each."""
    size = length // 32
    positions = torch.arange(size, dtype=torch.int16, device=device).repeat(16 * batch_size)
    return {
        "prefix_len_ptr": torch.full((batch_size,), length // 2, dtype=torch.int32, device=device),
        "token_pos_in_items_ptr": positions,
        "token_pos_in_items_len": 16 * size,
        "max_item_len_ptr": torch.full((batch_size,), size - 1, dtype=torch.int16, device=device),
    }


MASKS = {"lower": _lower, "tree": _tree, "items": _items}

# ---- The table ----

MAKERS: dict[str, Callable[..., Call]] = {"prefill": _prefill, "decode": _decode}


def _row(
    kind: str,
    plan: dict[str, Any] | None = None,
    make: dict[str, Any] | None = None,
    *,
    most: float | None = None,
    work: float = 1.0,
    plain: dict[str, Any] | None = None,
    **common: Any,
) -> Row:
    """Options of one call alone are `plan` and `make`; `common` are both calls'."""
    common_plan = common.pop("plan_of_both", {})
    option = Option(kind, {**common_plan, **(plan or {})}, {**common, **(make or {})})
    return Row(option, Option(kind, {**common_plan, **(plain or {})}, common), most, work)


CAP, ROPE = {"logits_soft_cap": 30.0}, {"pos_encoding_mode": "ROPE_LLAMA"}
WINDOW = {"window_left": 512}
FIXED = {"fixed_split_size": 2048}
UNCUT = {**FIXED, "disable_split_kv": True}
KEYS_8 = {"kv_data_type": E4M3}
ALL_8 = {"q_data_type": E4M3, "kv_data_type": E4M3, "o_data_type": BF16}
LONG = {"batch_size": 64, "length": 8192}
MIXED = {"batch_size": 64, "length": 4096, "mixed": True}
DRAFTS = {"queries": 64, "length": 4096}

OPTIONS: dict[str, Row] = {
    "soft cap": _row("prefill", CAP, most=1.2),
    "soft cap, fa2": _row("prefill", CAP, most=1.2, backend="fa2"),
    "soft cap, window 512": _row("prefill", CAP, most=1.2, plan_of_both=WINDOW),
    "soft cap, window 512, fa2": _row("prefill", CAP, most=1.2, plan_of_both=WINDOW, backend="fa2"),
    "soft cap, decode": _row("decode", CAP, most=1.2),
    "ROPE_LLAMA": _row("prefill", ROPE, most=1.3),
    "ROPE_LLAMA, fa2": _row("prefill", ROPE, most=1.3, backend="fa2"),
    "ROPE_LLAMA, decode": _row("decode", ROPE, most=1.1),
    "ALIBI": _row("prefill", {"pos_encoding_mode": "ALIBI"}),
    "custom mask": _row("prefill", {}, {"mask": "lower"}, most=1.5, batch_size=2),
    "custom mask, fa2": _row(
        "prefill", {}, {"mask": "lower"}, most=1.5, batch_size=2, backend="fa2"
    ),
    **{
        f"tree of 64 drafts, {count} x 4096 keys{name}": Row(
            Option("prefill", {}, {"mask": "tree", **DRAFTS, "batch_size": count, **forced}),
            Option("prefill", {}, {"mask": "none", **DRAFTS, "batch_size": count, **forced}),
            1.15,
        )
        for name, forced in (("", {}), (", fa2", {"backend": "fa2"}))
        for count in (1, 16)
    },
    "16 items after a prefix": _row("prefill", {}, {"mask": "items"}, most=1.5),
    "16 items after a prefix, fa2": _row("prefill", {}, {"mask": "items"}, most=1.5, backend="fa2"),
    "pages of 1": _row("prefill", {}, {"page_size": 1}, most=1 / 0.85),
    "pages of 16": _row("prefill", {}, {"page_size": 16}),
    "192/128, 16 heads, per product": _row(
        "prefill",
        {},
        {"heads": (16, 16), "head_dims": (192, 128)},
        most=1 / 0.97,
        work=16 * (192 + 128) / (32 * (128 + 128)),
    ),
    "LSE, 28/4 heads, 8 x 1500": _row(
        "prefill", {}, {"return_lse": True}, most=1.0, heads=(28, 4), batch_size=8, length=1500
    ),
    "LSE, 28/4 heads, 8 x 1500, fa2": _row(
        *("prefill", {}, {"return_lse": True}),
        **{"most": 1.0, "heads": (28, 4), "batch_size": 8, "length": 1500, "backend": "fa2"},
    ),
    **{
        f"lengths on the device, {name}": _row(
            "decode", {}, {"on_device": True}, most=1.05, **sizes
        )
        for name, sizes in (
            ("64 x 8192", LONG),
            ("256 x 2048", {"batch_size": 256, "length": 2048}),
            ("64 x 512 to 8192", MIXED),
            ("1 x 8192", {"batch_size": 1, "length": 8192}),
        )
    },
    "4 bits beside e4m3, decode 64 x 8192": _row(
        "decode", {"kv_data_type": PACKED}, most=0.62, plain=KEYS_8, **LONG
    ),
    **{
        f"heads of {dim}, decode, per byte": _row(
            "decode", {}, {"head_dim": dim}, most=1 / 0.8, work=dim / 128
        )
        for dim in (256, 448, 512)
    },
    "heads of 512, e4m3, decode, per byte": _row(
        "decode", {}, {"head_dim": 512}, most=1 / 0.8, work=4, plan_of_both=KEYS_8
    ),
    **{
        f"heads of {dim}, per product": _row(
            "prefill", {}, {"head_dims": (dim, dim)}, work=dim / 128
        )
        for dim in (256, 512)
    },
    "cut at 2048, decode": _row("decode", FIXED, most=1.1, **LONG),
    "not cut, decode": _row("decode", UNCUT, most=1.1, **LONG),
    "cut at 2048": _row("prefill", FIXED, most=1.1, page_size=PAGE_SIZE),
    "not cut": _row("prefill", UNCUT, most=1.1, page_size=PAGE_SIZE),
    "not cut, fa2": _row("prefill", UNCUT, most=1.1, page_size=PAGE_SIZE, backend="fa2"),
    **{
        f"auto beside fa3, {count} queries a request, decode": Row(
            Option("decode", {"q_len_per_req": count}, {}),
            Option("decode", {"q_len_per_req": count}, {"backend": "fa3"}),
            1.05,
        )
        for count in (4, 16)
    },
    "e4m3 queries over e4m3, decode": _row("decode", ALL_8, plain=KEYS_8),
    "e4m3 queries over e4m3, decode, fa3": _row("decode", ALL_8, plain=KEYS_8, backend="fa3"),
}


# ---- Timing ----


def best_us(call: Call) -> float:
    """Microseconds of a call as a CUDA graph, the best of several rounds."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * begin.elapsed_time(end) / CALLS)
    return best


def print_options(device: str = "cuda", time_call: Callable[[Call], float] = best_us) -> None:
    """Print the table.

    Parameters
    ----------
    device : str
        Where the calls run.
    time_call : callable
        Microseconds of a call.
    """
    rows = []
    for name, row in OPTIONS.items():
        calls = (row.option, row.plain)
        with_it, plain = (time_call(MAKERS[o.kind](device, o.plan, **o.make)) for o in calls)
        rows.append((name, plain, with_it, with_it / plain / row.work, row.most))
    headers = ("option", "plain, us", "with it, us", "ratio", "at most")
    print(tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".2f", ".2f")))
