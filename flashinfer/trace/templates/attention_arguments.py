"""Brings a call's arguments and the wrapper's plan into the form of the definitions.

Keys and values as [..., num_kv_heads, head_dim], a cache's keys apart from its values, scales
folded into one for the logits and one for the output, masks as bools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..._common.checks import choice
from ..._common.checks import tensor as check_tensor
from ..._common.dtypes import torch_name
from .attention_packed import dtype_with_scales, pair_of, with_scales

Arguments = Mapping[str, Any]
POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "skip_softmax_threshold_scale_factor": (None,),
    "use_fp16_softmax": (None, False),
    "uses_spcompress": (None, False),
    "o_scale": (None,),
}


def _scale(name: str, value: Any) -> float:
    """A scale that may be absent or a tensor of one element."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` must have one element, got shape {list(value.shape)}")
        return 1.0 if value.device.type == "meta" else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return float(value)


_SCALES = ("q_scale", "k_scale", "v_scale")


def _split_scales(
    values: Arguments, q: torch.Tensor, num_kv_heads: int
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Numbers for the logits and the output, and factors of each head.

    `values`: scales of queries, keys and values, in this order, by their names; `q`: [..., heads,
    head_dim].
    """
    counts = (q.shape[-2], num_kv_heads, num_kv_heads)
    numbers, of_heads = [], {}
    for operand, count, (name, value) in zip("qkv", counts, values.items(), strict=True):
        if not isinstance(value, torch.Tensor) or (value.is_cpu and value.numel() == 1):
            numbers.append(_scale(name, value))
            continue
        numbers.append(1.0)
        if not value.is_floating_point() or value.shape not in ((), (1,), (count,)):
            raise ValueError(
                f"`{name}` must be one number or float32 of shape [{count}], got {value.dtype} of "
                f"shape {list(value.shape)}"
            )
        value = value.float()
        if value.device != q.device:
            raise ValueError(f"`{name}` must be on {q.device}, got {value.device}")
        of_heads[f"{operand}_head_scale"] = value.expand(count)
    return numbers[0] * numbers[1], numbers[2], of_heads


def _check_kv_dtype(q: Any, name: str, kv: torch.Tensor) -> None:
    if not isinstance(q, torch.Tensor):
        return
    float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    allowed = tuple(dict.fromkeys((q.dtype, *float8)))
    if kv.dtype not in allowed:
        choices = " or ".join(torch_name(dtype) for dtype in allowed)
        raise ValueError(f"`{name}` must have dtype {choices}, got {kv.dtype}")


def _in_use(**scalars: tuple[float, float]) -> dict[str, float]:
    """The values that mean something; each has a second value that means none."""
    return {name: value for name, (value, none) in scalars.items() if value != none}


def _number(name: str, value: Any, default: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")
    return default if value is None else value


def _window(value: Any) -> int:
    """A window of a call without plan; -1: none."""
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`window_left` must be an int, got {value!r}")
    if value < -1:
        raise ValueError(f"`window_left` must be at least -1, got {value}")
    return value


def _single_options(
    arguments: Arguments, head_dim: int, factor: float, v_scale: float
) -> dict[str, Any]:
    """Scalars and flags of a function without plan; `factor` joins `sm_scale`."""
    mode = arguments.get("pos_encoding_mode", "NONE")
    choice("pos_encoding_mode", mode, POS_ENCODINGS)
    sm_scale = _number("sm_scale", arguments.get("sm_scale"), 1 / math.sqrt(max(head_dim, 1)))
    window = _window(arguments.get("window_left"))
    soft_cap = max(_number("logits_soft_cap", arguments.get("logits_soft_cap"), 0.0), 0.0)
    options: dict[str, Any] = {
        "sm_scale": sm_scale * factor,
        "pos_encoding_mode": mode,
        **_in_use(
            v_scale=(v_scale, 1.0),
            window_left=(window, -1),
            logits_soft_cap=(soft_cap, 0.0),
        ),
    }
    for name, default in (("rope_scale", 1.0), ("rope_theta", 1e4)):
        value = _number(name, arguments.get(name), default)
        if not value > 0:
            raise ValueError(f"`{name}` must be positive, got {value}")
        if mode == "ROPE_LLAMA":
            options[name] = value
    return options


def _keys(name: str, value: Any, kv_layout: Any) -> torch.Tensor:
    """Keys or values as [tokens, heads, dim], from NHD or HND."""
    choice("kv_layout", kv_layout, ("NHD", "HND"))
    tensor = check_tensor(name, value, 3)
    return tensor if kv_layout == "NHD" else tensor.transpose(0, 1)


def gather_single_decode(arguments: Arguments) -> dict[str, Any]:
    q = check_tensor("q", arguments["q"], 2)
    kv_layout = arguments.get("kv_layout", "NHD")
    k, v = (_keys(name, arguments[name], kv_layout) for name in ("k", "v"))
    _check_kv_dtype(q, "k", k)
    choice("use_tensor_cores", arguments.get("use_tensor_cores", False), (False, True))
    scales = {name: arguments.get(name) for name in _SCALES}
    factor, v_scale, of_heads = _split_scales(scales, q, k.shape[1])
    options = _single_options(arguments, q.shape[-1], factor, v_scale)
    return {"q": q, "k": k, "v": v, **of_heads, **options}


def gather_single_prefill(arguments: Arguments) -> dict[str, Any]:
    q = check_tensor("q", arguments["q"], 3)
    kv_layout = arguments.get("kv_layout", "NHD")
    k, v = (_keys(name, arguments[name], kv_layout) for name in ("k", "v"))
    sf = arguments.get("kv_cache_sf")
    blocks = None if sf is None else [_keys("kv_cache_sf", x, kv_layout) for x in pair_of(sf)]
    k, v = with_scales(k.dtype, q, k, v, blocks)
    _check_kv_dtype(q, "k", k)
    mask = _single_mask(arguments, len(q), len(k))
    causal = arguments.get("causal", False)
    choice("causal", causal, (False, True))
    choice("backend", arguments.get("backend", "auto"), ("auto", "fa2", "fa3"))
    fp16_sums = arguments.get("use_fp16_qk_reduction", False)
    choice("use_fp16_qk_reduction", fp16_sums, (False,))
    scales = {"scale_q": arguments.get("scale_q")}
    for operand in "kv":
        names = (f"scale_{operand}", f"{operand}_scale")
        given = [name for name in names if arguments.get(name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` exclude each other")
        name = given[0] if given else names[0]
        scales[name] = arguments.get(name)
    factor, v_scale, of_heads = _split_scales(scales, q, k.shape[1])
    o_dtype = arguments.get("o_dtype") or q.dtype
    return {
        "q": q,
        "k": k,
        "v": v,
        "causal": causal and mask is None,
        "custom_mask": mask,
        "o_dtype": o_dtype,
        **of_heads,
        **_single_options(arguments, q.shape[-1], factor, v_scale),
    }


def _single_mask(arguments: Arguments, qo_len: int, kv_len: int) -> torch.Tensor | None:
    """[qo_len, kv_len] bool, from `packed_custom_mask` or else `custom_mask`."""
    packed, mask = arguments.get("packed_custom_mask"), arguments.get("custom_mask")
    if packed is not None:
        packed = check_tensor("packed_custom_mask", packed, 1)
        if packed.dtype != torch.uint8 or len(packed) < -(-qo_len * kv_len // 8):
            raise ValueError(
                f"`packed_custom_mask` must be uint8 of {-(-qo_len * kv_len // 8)} bytes, got "
                f"{packed.dtype} of {len(packed)}"
            )
        return _bits(packed)[: qo_len * kv_len].view(qo_len, kv_len)
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"`custom_mask` must be a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.uint8) or mask.numel() != qo_len * kv_len:
        raise ValueError(
            f"`custom_mask` must be bool of shape [{qo_len}, {kv_len}], got {mask.dtype} of shape "
            f"{list(mask.shape)}"
        )
    return mask.reshape(qo_len, kv_len) != 0


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Bools of packed bytes, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).flatten().bool()


def problem_arguments(
    problem: Any,
    run: Arguments,
    device: torch.device,
    scales: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Inputs of a definition that a plan fixed, for tensors on `device`.

    Parameters
    ----------
    problem : AttentionProblem
        The problem that `plan` has kept.
    run : mapping
        Arguments of `run`: scales, a window and sinks override or join the plan's.
    device : torch.device
        Device of the queries.
    scales : tuple of float, optional
        Factors of the logits and of the output, if not all scales of `run` are numbers.
    """
    spec, requests, tensors = problem
    _check_not_a_users(spec.variant)
    if scales is None:
        q_scale, k_scale, v_scale = (_scale(name, run.get(name)) for name in _SCALES)
        scales = (q_scale * k_scale, v_scale)
    given = run.get("window_left")
    window = spec.window_left if given is None else _window(given)
    if spec.window_left >= 0 and not 0 <= window <= spec.window_left:
        raise ValueError(
            f"`window_left` of run() must be from 0 to the {spec.window_left} of plan(), got "
            f"{window}"
        )
    soft_cap = max(_number("logits_soft_cap", run.get("logits_soft_cap"), 0.0), 0.0)
    inputs: dict[str, Any] = {
        "sm_scale": spec.sm_scale * scales[0],
        "causal": spec.causal and problem.mask_mode != "custom",
        "pos_encoding_mode": spec.pos_encoding_mode,
        "o_dtype": spec.o_data_type,
        "sinks": run.get("sinks"),
        **_in_use(
            v_scale=(scales[1], 1.0),
            window_left=(-1 if window < 0 else window, -1),
            logits_soft_cap=(soft_cap or spec.logits_soft_cap, 0.0),
        ),
    }
    if spec.pos_encoding_mode == "ROPE_LLAMA":
        inputs |= {"rope_scale": spec.rope_scale, "rope_theta": spec.rope_theta}
    lengths = requests.kv_lengths()
    qo_lengths = requests.qo_lengths()
    if problem.mask_mode == "custom":
        inputs["custom_mask"] = _mask_of(problem, qo_lengths * lengths)
    if problem.mask_mode == "multi_item":
        items = tensors.mask
        inputs["prefix_len_ptr"] = items.prefix_len_ptr.to(torch.int32)
        shape = (requests.batch_size, items.token_pos_in_items_len)
        positions = items.token_pos_in_items_ptr.to(torch.int32).view(shape)
        inputs["token_pos_in_items_ptr"] = positions
    indptr = requests.qo_indptr
    if indptr is None:
        step = requests.tokens_per_request
        indptr = torch.arange(requests.batch_size + 1, dtype=torch.int32) * step
    inputs |= {"qo_indptr": indptr, "kv_indptr": requests.kv_indptr}
    if requests.page_size:
        pages = requests.kv_indptr.diff()
        last = lengths - (pages - 1).clamp(min=0) * requests.page_size
        inputs |= {"kv_indices": tensors.kv_indices, "kv_last_page_len": last.to(torch.int32)}
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def _run_arguments(
    problem: Any, run: Arguments, q: torch.Tensor, args: tuple[Any, ...] | None
) -> dict[str, Any]:
    """`problem_arguments` of a `run` that takes scales of each head."""
    _check_not_a_users(problem.spec.variant)  # whose `args` are its own
    named = [run.get(name) for name in _SCALES]
    if args and (len(args) != 3 or named != [None] * 3):
        raise TypeError(
            f"run() takes three scales by position, or by name, got {len(args)} by position and "
            f"{named} by name"
        )
    scales = dict(zip(_SCALES, args or named, strict=True))
    factor, v_scale, of_heads = _split_scales(scales, q, problem.spec.num_kv_heads)
    return {**problem_arguments(problem, run, q.device, (factor, v_scale)), **of_heads}


def _check_not_a_users(variant: Any) -> None:
    if variant is not None:
        raise NotImplementedError("there is no reference of a user's attention variant")


def _mask_of(problem: Any, sizes: torch.Tensor) -> torch.Tensor:
    bits = _bits(problem.tensors.mask.bits)
    starts = (problem.tensors.mask.indptr.long() * 8).tolist()
    parts = [
        bits[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=False)
    ]
    return torch.cat(parts) if parts else bits


def planned_problem(run: Arguments) -> Any:
    """The problem that a wrapper has planned.

    Raises
    ------
    ValueError
        If there is no wrapper, or `plan` was not called.
    """
    problem = getattr(run.get("self"), "_problem", None)
    if problem is None:
        raise ValueError("plan() must be called before run(), and again after new workspaces")
    return problem


def predict_planned(run: Arguments) -> dict[str, Any]:
    """Columns and dtype of the results of a planned wrapper."""
    planned = run["self"]._planned_results
    if planned is None:
        raise ValueError("plan() must be called before run(), and again after new workspaces")
    return {"head_dim_vo": planned[0], "o_dtype": planned[1]}


def predict_single(arguments: Arguments) -> dict[str, Any]:
    """The dtype of the result of a call for one request."""
    return {"o_dtype": arguments.get("o_dtype") or arguments["q"].dtype}


def pages_of(name: str, cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [pages, page_size, heads, dim], from a tuple or a fused cache.

    Caches of pages of one token may lack the dimension that is 1.
    """
    if isinstance(cache, torch.Tensor):
        both = tuple(check_tensor(name, cache, 4 if cache.ndim == 4 else 5).unbind(1))
        if len(both) != 2:
            raise ValueError(
                f"`{name}` must have shape [pages, 2, ...] with keys and values, got "
                f"{list(cache.shape)}"
            )
    elif isinstance(cache, (tuple, list)) and len(cache) == 2:
        by_token = isinstance(cache[0], torch.Tensor) and cache[0].ndim == 3
        both = tuple(check_tensor(name, part, 3 if by_token else 4) for part in cache)
    else:
        raise TypeError(
            f"`{name}` must be a tensor or a tuple of keys and values, got {type(cache).__name__}"
        )
    if both[0].ndim == 3:
        k, v = (part.unsqueeze(1) for part in both)
    else:
        k, v = both if kv_layout == "NHD" else (part.transpose(1, 2) for part in both)
    return k, v


def _check_planned(problem: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors that are not those that were planned for."""
    spec, requests, _ = problem
    tokens = requests.num_qo_tokens
    kv_dtype = dtype_with_scales(spec)
    sizes = (
        ("q", q, (tokens, spec.num_qo_heads, spec.head_dim_qk), spec.q_data_type),
        ("k", k, (spec.num_kv_heads, spec.head_dim_qk), kv_dtype),
        ("v", v, (spec.num_kv_heads, spec.head_dim_vo), kv_dtype),
    )
    for name, tensor, shape, dtype in sizes:
        if tuple(tensor.shape[-len(shape) :]) != shape:
            by_count = name == "q" and requests.qo_indptr is None
            reason = f": `q_len_per_req` is {requests.tokens_per_request}" if by_count else ""
            raise ValueError(
                f"`{name}` must end in shape {list(shape)}, got {list(tensor.shape)}{reason}"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"`{name}` must have dtype {dtype} as planned, got {tensor.dtype}")


def gather_paged(
    run: Arguments, cache: str = "paged_kv_cache", args: tuple[Any, ...] | None = None
) -> dict[str, Any]:
    """Arguments of `run(q, paged_kv_cache, ...)`; `args`: scales by position, None: its own."""
    problem = planned_problem(run)
    spec, requests, tensors = problem
    q = check_tensor("q", run["q"], 3)
    k, v = pages_of(cache, run[cache], spec.kv_layout)
    sf = run.get("kv_cache_sf")
    scales = None if sf is None else pages_of("kv_cache_sf", sf, spec.kv_layout)
    k, v = with_scales(spec.kv_data_type, q, k, v, scales)
    graph = run["self"].is_cuda_graph_enabled
    planned_rows = q[: requests.num_qo_tokens] if graph else q
    _check_planned(problem, planned_rows, k, v)
    if k.shape[1] != requests.page_size:
        raise ValueError(f"`{cache}` must have pages of {requests.page_size}, got {k.shape[1]}")
    listed, needed = len(tensors.kv_indices), int(requests.kv_indptr[-1])
    if listed < needed:
        raise ValueError(f"`indices` of plan() must have {needed} page numbers, got {listed}")
    _check_page_numbers(tensors.kv_indices[int(requests.kv_indptr[0]) : needed], len(k))
    inputs = _run_arguments(problem, run, q, run.get("args") if args is None else args)
    if len(q) > len(planned_rows):
        inputs |= _with_padding(inputs, len(q), requests.tokens_per_request)
    return {"q": q, "k_cache": k, "v_cache": v, **inputs, **destinations(run)}


def _check_page_numbers(pages: torch.Tensor, num_pages: int) -> None:
    """Refuse what the kernel, which cannot wait for the numbers, takes for pages of zeros."""
    if not pages.is_cpu or not pages.numel():
        return
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= num_pages:
        raise ValueError(
            f"`indices` of plan() must be page numbers from 0 to {num_pages - 1}, got "
            f"{low if low < 0 else high}"
        )


def _with_padding(inputs: Arguments, rows: int, tokens_per_request: int) -> dict[str, torch.Tensor]:
    """A CUDA graph's rows beyond the plan, as requests without keys: their result is 0."""
    names = ("qo_indptr", "kv_indptr", "kv_last_page_len")
    qo_indptr, kv_indptr, last = (inputs[name] for name in names)
    first = int(qo_indptr[-1])
    step = tokens_per_request if (rows - first) % tokens_per_request == 0 else rows - first
    bounds = torch.arange(first + step, rows + 1, step).to(qo_indptr)
    return {
        "qo_indptr": torch.cat([qo_indptr, bounds]),
        "kv_indptr": torch.cat([kv_indptr, kv_indptr[-1:].expand(len(bounds))]),
        "kv_last_page_len": torch.cat([last, last.new_zeros(len(bounds))]),
    }


def gather_paged_decode(run: Arguments) -> dict[str, Any]:
    """Arguments of a decode wrapper's `run`."""
    per_request = planned_problem(run).requests.tokens_per_request
    choice("q_len_per_req", run.get("q_len_per_req"), (None, per_request))
    inputs = gather_paged(run)
    if per_request == 1:
        del inputs["qo_indptr"]
    return inputs


def gather_ragged(run: Arguments) -> dict[str, Any]:
    problem = planned_problem(run)
    q, k, v = (check_tensor(name, run[name], 3) for name in ("q", "k", "v"))
    if problem.spec.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    layout, sf = problem.spec.kv_layout, run.get("kv_cache_sf")
    scales = None if sf is None else [_keys("kv_cache_sf", x, layout) for x in pair_of(sf)]
    k, v = with_scales(problem.spec.kv_data_type, q, k, v, scales)
    _check_planned(problem, q, k, v)
    needed = int(problem.requests.kv_indptr[-1])
    if len(k) < needed or len(v) != len(k):
        raise ValueError(f"`k` and `v` must have {needed} rows, got {len(k)} and {len(v)}")
    inputs = _run_arguments(problem, run, q, run.get("args"))
    return {"q": q, "k": k, "v": v, **inputs, **destinations(run)}


def destinations(run: Arguments) -> dict[str, Any]:
    """Where results go, and what is refused when it is not the default."""
    for name, allowed in _UNSUPPORTED.items():
        if name in run:
            choice(name, run[name], allowed)
    kept = ("out", "out_scale", "lse", "enable_pdl", "lse_base", "lse_layout")
    return {name: run[name] for name in kept if name in run}
