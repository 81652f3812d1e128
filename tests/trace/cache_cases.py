"""What the optional arguments of rope, page and cascade do; see test_argument_coverage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments, iter_tensors
from tests.trace.calls import Operation, parameters_of

Case = Callable[[Operation, str, dict[str, Any]], None]


def _call(operation: Operation, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Everything that one call returns or writes."""
    mine = clone_arguments(arguments)
    returned = operation.api(**mine)
    return [*iter_tensors(mine), *iter_tensors(returned)]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(
        x.shape == y.shape and torch.equal(x.float(), y.float())
        for x, y in zip(first, second, strict=True)
    )


def counts(value: Any, *, wrong: Any, named: str = "") -> Case:
    """`value` gives another result than the example's, and `wrong` is refused by name.

    `named`: another name that the message may have.
    """

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = _call(operation, arguments)
        assert not _same(usual, _call(operation, {**arguments, name: value}))
        with pytest.raises((TypeError, ValueError), match=named or name):
            operation.api(**{**arguments, name: wrong})

    return case


def is_a_switch(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The other value gives another result; what is no bool is refused."""
    default = parameters_of(operation.function)[name].default
    counts(not arguments.get(name, default), wrong=1)(operation, name, arguments)


def chooses_8_bits(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    dtypes = {False: torch.bfloat16, True: torch.float8_e4m3fn}
    usual = {key: value for key, value in arguments.items() if "quant_scale" not in key}
    for value, dtype in dtypes.items():
        results = operation.api(**{**usual, name: value})
        assert all(result.dtype == dtype for result in results)
    with pytest.raises(TypeError, match=name):
        operation.api(**{**arguments, name: 1})


def is_of_8_bits(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A scale counts where the result is quantised, and is refused where it is not."""
    if arguments["output_fp8"]:
        counts(0.5, wrong=0.0)(operation, name, arguments)
        return
    for wrong in (0.5, "1"):
        with pytest.raises((TypeError, ValueError), match=name):
            operation.api(**{**arguments, name: wrong})


def defaults_to_the_head(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    whole = {**arguments, name: arguments["q"].shape[-1]}
    assert _same(_call(operation, arguments), _call(operation, whole))
    counts(16, wrong=3)(operation, name, arguments)


def receives_a_result(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The tensor given is among what is returned, and holds the result."""
    usual = operation.api(**clone_arguments(arguments))
    keys = [key for key, spec in operation.template.outputs.items() if spec.tuple_idx is None]
    index = [operation.template.outputs[key].param for key in keys].index(name)
    destination = torch.empty_like(usual[index])
    mine = clone_arguments(arguments)
    returned = operation.api(**mine, **{name: destination})
    assert returned[index].data_ptr() == destination.data_ptr()
    assert torch.equal(destination.float(), usual[index].float())
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: destination[:-1]})
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: destination.double()})


def chooses_the_codes(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Results have the dtype asked for; caches must have it already."""
    results = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = {**clone_arguments(arguments), name: dtype}
        if "paged_kv_cache" in mine:
            mine["paged_kv_cache"] = tuple(x.to(dtype) for x in arguments["paged_kv_cache"])
        results.append(operation.api(**mine)[0])
        assert results[-1].dtype == dtype
    assert not torch.equal(results[0].float(), results[1].float())
    with pytest.raises((TypeError, ValueError), match="quantize_dtype|q_rope_out"):
        operation.api(**{**arguments, name: torch.float16})
    if "paged_kv_cache" in arguments:
        with pytest.raises(ValueError, match="paged_kv_cache"):
            operation.api(**{**arguments, name: torch.float8_e5m2})


def is_the_cache_s(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: parameters_of(operation.function)[name].default})


def says_how_caches_lie(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Another layout is another shape of cache: refused unless there are no heads in it."""
    other = "HND" if arguments.get(name, "NHD") == "NHD" else "NHD"
    changed = {**arguments, name: other}
    if "mla" in operation.template.name_prefix:
        assert _same(_call(operation, arguments), _call(operation, changed))
    else:
        with pytest.raises(ValueError, match="cache|page_size|heads"):
            operation.api(**changed)
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: "DHN"})


def is_a_norm_of_heads(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Without weights there is no norm, which is not one with weights of 1."""
    results = [
        _call(operation, {**arguments, name: weight})
        for weight in (None, torch.ones_like(arguments[name]), arguments[name])
    ]
    assert not _same(results[0], results[1]) and not _same(results[1], results[2])
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: arguments[name][:-1]})


def chooses_tokens(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """No mask is a mask of ones; a token whose mask is 0 stays as it is."""
    v = arguments["v"]
    ones = torch.ones(len(v), dtype=torch.bool, device=v.device)
    every, masked = clone_arguments(arguments), clone_arguments(arguments)
    operation.api(**every)
    operation.api(**{**masked, name: ones})
    assert torch.equal(every["v"], masked["v"]) and torch.equal(every["s"], masked["s"])
    ones[::2] = False
    masked = clone_arguments(arguments)
    operation.api(**{**masked, name: ones})
    for key in ("v", "s"):
        assert torch.equal(masked[key][::2], arguments[key][::2])
        assert torch.equal(masked[key][1::2], every[key][1::2])


CASES: dict[str, Case] = {
    "batch_indices": receives_a_result,
    "attention_factor": counts(0.5, wrong=0.0),
    "base": counts(100.0, wrong=0.0),
    "factor": counts(4.0, wrong=-1.0),
    "high": counts(8.0, wrong=-1.0),
    "high_freq_factor": counts(2.0, wrong=0.5),
    "interleave": is_a_switch,
    "is_qk_norm": is_a_switch,
    "is_neox": counts(False, wrong=1),
    "k_nope_out": receives_a_result,
    "k_weight": is_a_norm_of_heads,
    "k_out": receives_a_result,
    "k_rope_out": receives_a_result,
    "kv_layout": says_how_caches_lie,
    "low": counts(2.0, wrong=9.0),
    "low_freq_factor": counts(2.0, wrong=9.0),
    "mask": chooses_tokens,
    "old_context_len": counts(100, wrong=0),
    "output_fp8": chooses_8_bits,
    "output_quant_scale": is_of_8_bits,
    "page_size": is_the_cache_s,
    "positions": receives_a_result,
    "q_nope_out": receives_a_result,
    "q_out": receives_a_result,
    "q_rope_out": receives_a_result,
    "q_weight": is_a_norm_of_heads,
    "quant_scale_k": counts(0.5, wrong=0.0),
    "quant_scale_kv": counts(0.5, wrong=0.0),
    "quant_scale_q": counts(0.5, wrong=-1.0),
    "quant_scale_v": counts(0.5, wrong=-1.0),
    "quantize_dtype": chooses_the_codes,
    "rope_scale": counts(4.0, wrong=0.0),
    "rope_theta": counts(100.0, wrong=-1.0),
    "rotary_dim": defaults_to_the_head,
    "v_out": receives_a_result,
    "v_quant_scale": is_of_8_bits,
}
