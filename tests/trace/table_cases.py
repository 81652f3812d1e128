"""Optional arguments of attention by block tables; see test_argument_coverage.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments, iter_tensors
from tests.trace import attention_cases
from tests.trace.calls import Operation, parameters_of


def _is_required(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: None})
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: arguments[name].float()})


def _tells_the_pages(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Other pages give another result; a table that is seen to have too few is refused, and none at
    all unless each request has one page."""
    attention_cases.becomes(lambda call: call[name].flip(1))(operation, name, arguments)
    table = arguments[name]
    for wrong in (table[:1], table.float(), None, *([] if table.is_cuda else [table[:, :1]])):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


def _are_those_of_a_row(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Offsets of requests that follow each other; others are refused."""
    call = {**arguments, "return_lse": False}
    usual, batch = operation.api(**call), len(arguments["actual_seq_lens_kv"])
    stride = 0 if name[-1] in "kv" else arguments["q"].stride(0) * arguments["q_len_per_req"]
    offsets = torch.arange(batch + 1, device=usual.device) * stride
    assert torch.equal(usual, operation.api(**{**call, name: offsets}))
    is_refused(offsets[1:], offsets.float(), 3)(operation, name, call)
    if stride:
        is_refused(offsets * 2)(operation, name, call)


def is_refused(*values: Any) -> attention_cases.Case:
    """Values of kernels that there are not."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        for value in values:
            with pytest.raises((TypeError, ValueError), match=name):
                operation.api(**{**arguments, name: value})

    return case


def _called(operation: Operation, arguments: dict[str, Any]) -> list[torch.Tensor]:
    return list(iter_tensors(operation.api(**clone_arguments(arguments))))


def factor(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Another number counts, a tensor of one is as good, and text is refused."""
    usual, number = _called(operation, arguments), arguments.get(name, 1.0)
    as_tensor = torch.tensor([number], dtype=torch.float32)
    again, changed = (
        _called(operation, {**arguments, name: value}) for value in (as_tensor, 2.0 * number)
    )
    assert torch.equal(usual[0], again[0]) and not torch.equal(usual[0], changed[0])
    is_refused("2")(operation, name, arguments)


def _choose_tokens(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Tokens by number: those of the pages in order are all that a query sees."""
    pages, (batch, q_len) = arguments["block_tables"], arguments["query"].shape[:2]
    tokens = (pages[:, :, None] * 4 + torch.arange(4, device=pages.device)).flatten(1)
    chosen = tokens[:, None].expand(batch, q_len, 8).int().contiguous()
    sparse = {**arguments, "block_tables": chosen, "sparse_mla_top_k": 8}
    seen = arguments["seq_lens"][:, None] - torch.arange(q_len - 1, -1, -1, device=pages.device)
    lengths = {"sparse_mla_top_k_lens": seen.flatten().int(), "seq_lens": None}
    usual = _called(operation, arguments)
    for call in (sparse, {**sparse, **lengths}):
        assert all(map(torch.allclose, usual, _called(operation, call)))
    wrong = -1 if name == "sparse_mla_top_k" else seen.flatten()[1:].int()
    with pytest.raises(ValueError, match=name):
        operation.api(**{**sparse, name: wrong})
    with pytest.raises(ValueError, match="sparse_mla_top_k_lens"):
        operation.api(**{**arguments, **lengths})


def _are_first_rows(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Queries one after the other, and a bound of their number."""
    usual, (batch, q_len) = _called(operation, arguments), arguments["query"].shape[:2]
    first = torch.arange(batch + 1, dtype=torch.int32, device=arguments["query"].device) * q_len
    flat = {**arguments, "query": arguments["query"].flatten(0, 1)}
    packed = _called(operation, {**flat, "cum_seq_lens_q": first, "max_q_len": q_len})
    assert torch.equal(usual[0].flatten(0, 1), packed[0])
    with pytest.raises((TypeError, ValueError), match=f"{name}|query"):
        operation.api(**{**arguments, name: first})


def _is_a_base(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    call = {**arguments, "return_lse": True}
    base_2, natural = (_called(operation, {**call, name: base}) for base in ("base2", "basee"))
    torch.testing.assert_close(natural[1], base_2[1] * 0.6931471805599453)
    is_refused("ln")(operation, name, arguments)


def sinks(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A logit per head, in a list as well."""
    values = torch.ones(attention_cases.HEADS, device=arguments["query"].device)
    usual, *changed = (
        _called(operation, {**arguments, name: value}) for value in (None, values, [values])
    )
    assert torch.equal(changed[0][0], changed[1][0]) and not torch.equal(usual[0], changed[0][0])
    is_refused(values[:-1], values.double(), 3)(operation, name, arguments)


def receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Where the only result goes."""
    (expected,) = _called(operation, arguments)
    destination = torch.full_like(expected, float("nan"))
    assert operation.api(**{**arguments, name: destination}) is destination
    assert torch.equal(destination, expected)
    is_refused(destination[:-1], destination.double())(operation, name, arguments)


def _is_not_read(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A buffer without use."""
    usual = _called(operation, arguments)
    counters = torch.zeros(4, dtype=torch.uint8, device=arguments["query"].device)
    assert all(map(torch.equal, usual, _called(operation, {**arguments, name: counters})))
    is_refused(3)(operation, name, arguments)


_OF_OTHER_KERNELS: dict[str, attention_cases.Case] = {
    "skip_softmax_threshold_scale_factor": is_refused(1.0),
    "uses_shared_paged_kv_idx": is_refused(False),
    "multi_ctas_kv_counter_buffer": _is_not_read,
    "cp_world": is_refused(2),
    "cp_rank": is_refused(1),
    "causal_seqlens_kv_global": is_refused(torch.zeros(1)),
}


def _moves_heads(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The other order of the dimensions of a page."""
    other = "NHD" if parameters_of(operation.function)[name].default == "HND" else "HND"
    moved = tuple(part.transpose(1, 2).contiguous() for part in arguments["kv_cache"])
    usual = _called(operation, arguments)
    again = _called(operation, {**arguments, "kv_cache": moved, name: other})
    assert all(map(torch.equal, usual, again))
    is_refused("DNH")(operation, name, arguments)


def _is_the_result_dtype(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    other = torch.float16 if arguments["query"].dtype == torch.bfloat16 else torch.bfloat16
    assert _called(operation, {**arguments, name: other})[0].dtype == other
    is_refused(torch.float32, "another")(operation, name, arguments)


def _counts_queries(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Rows of the queries say the same in another way; numbers that are not theirs are refused."""
    usual, first = _called(operation, arguments), torch.arange(4, dtype=torch.int32) * 2
    given = parameters_of(operation.function)
    rows = {("q_cu_seq_lens" if "q_cu_seq_lens" in given else "cum_seq_lens_q"): first}
    rows |= {"max_q_len": 2} if "max_q_len" in given else {}
    assert all(map(torch.equal, usual, _called(operation, {**arguments, **rows})))
    wrong = {"max_q_len": 1, "q_len_per_req": 0}.get(name, first[1:])
    with pytest.raises((TypeError, ValueError), match=name):
        changed = {**arguments, **(rows if name != "q_len_per_req" else {}), name: wrong}
        operation.api(**changed)


def _is_of_drafts(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Bits of what two queries see of each other."""
    device = arguments["query"].device
    usual, *masked = (
        _called(operation, {**arguments, name: mask})
        for mask in (
            None,
            *(torch.tensor([rows] * 3, device=device).to(torch.uint16) for rows in _TWO_QUERIES),
        )
    )
    assert torch.allclose(usual[0], masked[0][0])
    assert not torch.allclose(usual[0], masked[1][0])
    is_refused(torch.ones(1, device=device))(operation, name, arguments)


_TWO_QUERIES = [[1, 0], [3, 0]], [[1, 0], [2, 0]]
"""As causality has it, and two drafts of one token."""

_TABLES: dict[str, attention_cases.Case] = {
    **attention_cases.CASES,
    **_OF_OTHER_KERNELS,
    "bmm1_scale": factor,
    "bmm2_scale": factor,
    "sinks": sinks,
    "kv_layout": _moves_heads,
    "out_dtype": _is_the_result_dtype,
    "o_scale": is_refused(2.0),
    "o_sf_scale": is_refused(1.0),
    "o_sf_vec_size": is_refused(16),
    "mask": _is_of_drafts,
    "bmm1_scale_log2": is_refused(torch.ones(1)),
    "enable_block_sparse_attention": is_refused(True),
    "bf16q_fp8kv_transform_mode": is_refused("fast"),
    "request_order": is_refused(torch.zeros(1)),
    "request_order_plan": is_refused(torch.zeros(1)),
    "use_fp16_softmax": is_refused(True),
    "uses_spcompress": is_refused(True),
    "q_len_per_req": _counts_queries,
    "max_q_len": _counts_queries,
    "cum_seq_lens_q": _counts_queries,
    "q_cu_seq_lens": _counts_queries,
}
_LATENT: dict[str, attention_cases.Case] = {
    **attention_cases.CASES,
    **_OF_OTHER_KERNELS,
    "bmm1_scale": factor,
    "bmm2_scale": factor,
    "sinks": sinks,
    "sparse_mla_top_k": _choose_tokens,
    "sparse_mla_top_k_lens": _choose_tokens,
    "is_var_seq": attention_cases.has_no_effect,
    "cute_dsl_impl": is_refused("fast"),
    "kv_scale_format": is_refused("fast"),
    "cum_seq_lens_q": _are_first_rows,
    "max_q_len": _are_first_rows,
    "enable_dcp": is_refused(True),
    "use_fp16_softmax": is_refused(True),
    "return_lse_base": _is_a_base,
}


def _are_lengths(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Lengths on the host say what the first rows say, and count if they say something else."""
    rows = arguments["cum_seq_lens_q" if name.startswith("q") else "cum_seq_lens_kv"]
    usual = _called(operation, arguments)
    again = _called(operation, {**arguments, name: rows.diff().cpu()})
    assert all(map(torch.equal, usual, again))
    is_refused(rows.diff().float())(operation, name, arguments)


def _sinks_of_heads(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    values = torch.ones(attention_cases.HEADS, device=arguments["query"].device)
    usual, changed = (_called(operation, {**arguments, name: value}) for value in (None, values))
    assert not torch.equal(usual[0], changed[0])
    is_refused(values[:-1], values.double(), 3)(operation, name, arguments)


_RAGGED: dict[str, attention_cases.Case] = {
    **_TABLES,
    "attention_sinks": _sinks_of_heads,
    "sage_attn_sfs": is_refused((torch.ones(1), None, None, None)),
    "num_elts_per_sage_attn_blk": is_refused((1, 0, 0, 0)),
    "q_seq_lens_cpu": _are_lengths,
    "kv_seq_lens_cpu": _are_lengths,
    "skip_all_rows_active_check": attention_cases.has_no_effect,
}

CASES: dict[str, dict[str, attention_cases.Case]] = {
    "cudnn_batch_decode_with_kv_cache": {
        **attention_cases.CASES,
        "actual_seq_lens_kv": _is_required,
        "block_tables": _tells_the_pages,
        "is_cuda_graph_compatible": attention_cases.has_no_effect,
        **{f"batch_offsets_{name}": _are_those_of_a_row for name in "qokv"},
    },
    "trtllm_batch_context_with_kv_cache": _TABLES,
    "trtllm_batch_decode_with_kv_cache": _TABLES,
    "xqa_batch_decode_with_kv_cache": {**_TABLES, "out": receives},
    "trtllm_ragged_attention_deepseek": _RAGGED,
    "trtllm_batch_decode_with_kv_cache_mla": _LATENT,
    "xqa_batch_decode_with_kv_cache_mla": {**_LATENT, "out": receives},
}
