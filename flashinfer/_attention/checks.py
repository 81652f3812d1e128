"""Arguments of the attention wrappers: brought to one form, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._common.checks import count as check_count
from .._common.checks import tensor as check_tensor
from .._common.dtypes import torch_name
from .._common.numbers import plain
from ..jit.attention.config import CODES, FLOAT16, PACKED_FLOAT4, QUERIES, kv_dtypes
from ..jit.attention.variant import AttentionVariant, make_variant

BLACKWELL = "it belongs to kernels for Blackwell"
"""Why arguments of other backends are refused."""


class HeadScales(NamedTuple):
    """Factors of a launch beside those of its logits and outputs that are numbers.

    Attributes
    ----------
    logits : float
        A number all the same, for launches whose parts differ in it; not negative.
    q, k, v : torch.Tensor, optional
        Scales of queries, keys and values: float32, a value per head or one.
    """

    logits: float = 1.0
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


def resolve_dtype(name: str, dtype: Any) -> torch.dtype:
    """The dtype that an argument is or names."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        raise ValueError(f"`{name}` must name a torch.dtype such as 'bfloat16', got {dtype!r}")
    raise TypeError(f"`{name}` must be a torch.dtype or its name, got {dtype!r}")


def resolve_dtypes(
    q: Any, kv: Any, o: Any, *, with_codes: bool = False
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Element types of queries (float16 if None), caches and outputs; by default the first's.

    Keys and values have the type of the queries, 8 bits, or 4 bits in pairs (uint8), outputs 16
    bits or, where the caller asks for it and `with_codes`, 8.

    Raises
    ------
    ValueError
        If there is no kernel for them.
    """
    q_dtype = resolve_dtype("q_data_type", "float16" if q is None else q)
    kv_dtype = q_dtype if kv is None else resolve_dtype("kv_data_type", kv)
    o_dtype = q_dtype if o is None else resolve_dtype("o_data_type", o)
    for name, dtype, allowed in (
        ("q_data_type", q_dtype, QUERIES),
        ("kv_data_type", kv_dtype, kv_dtypes(q_dtype)),
        ("o_data_type", o_dtype, (*FLOAT16, CODES) if with_codes and o is not None else FLOAT16),
    ):
        if dtype not in allowed:
            names = ", ".join(torch_name(a) for a in allowed)
            raise ValueError(f"`{name}` must be one of {names}, got {torch_name(dtype)}")
    return q_dtype, kv_dtype, o_dtype


def with_data_type(q: Any, kv: Any, both: Any) -> tuple[Any, Any]:
    """`q_data_type` and `kv_data_type` where `data_type` stands in for those left out."""
    if both is None:
        return q, kv
    dtype = resolve_dtype("data_type", both)
    if kv is None:
        kv = dtype
    elif resolve_dtype("kv_data_type", kv) != dtype:
        raise ValueError(f"`data_type` must be left out or the `kv_data_type` {kv}, got {both}")
    # The string "float16" is what a plan says that says nothing.
    if q is None or (isinstance(q, str) and q == "float16" and dtype.itemsize == 2):
        q = dtype if dtype.itemsize == 2 else "float16"
    return q, kv


def split_size(value: Any) -> int | None:
    """`fixed_split_size`: tokens, or None; -1, which engines pass for none, is None too."""
    if value is None:
        return None
    value = plain(value)
    return None if type(value) is int and value == -1 else check_count("fixed_split_size", value)


def check_window(value: Any) -> int:
    """`window_left`: -1 for none, or how many keys before the query's own are seen."""
    return check_count("window_left", value, -1)


def check_pos_encoding(mode: Any) -> str:
    """`pos_encoding_mode`."""
    if mode not in POS_ENCODING_MODES:
        error = ValueError if isinstance(mode, str) else TypeError
        raise error(f"`pos_encoding_mode` must be one of {POS_ENCODING_MODES}, got {mode!r}")
    return mode


def scalar(name: str, value: Any) -> float:
    """A finite number; one-element CPU tensors count, a GPU's would make the host wait for it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` must be one number, got shape {list(value.shape)}")
        if value.device.type != "cpu":
            raise ValueError(
                f"`{name}` must be a float (or a tensor on the CPU), got a tensor on "
                f"{value.device}, which the host would have to wait for"
            )
        value = value.item()
    if type(value) is not float:
        value = plain(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"`{name}` must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return float(value)


def split_scales(
    device: torch.device,
    num_qo_heads: int,
    num_kv_heads: int,
    q: Any,
    k: Any,
    v: Any,
    names: tuple[str, str, str] = ("q_scale", "k_scale", "v_scale"),
) -> tuple[float, float, Sequence[HeadScales]]:
    """Scales of queries, keys and values as numbers that the host has and tensors of the device.

    Returns
    -------
    tuple
        Product of the numbers among those of `q` and `k`, that of `v`, and the tensors, of a value
        per head or one, if there are any: a sequence of one or of nothing.
    """
    factors: list[float] = []
    tensors: list[torch.Tensor | None] = []
    counts = (num_qo_heads, num_kv_heads, num_kv_heads)
    for name, count, value in zip(names, counts, (q, k, v), strict=True):
        if isinstance(value, torch.Tensor) and not (value.is_cpu and value.numel() == 1):
            tensors.append(_head_scale(name, value, count, device))
            factors.append(1.0)
        else:
            tensors.append(None)
            factors.append(1.0 if value is None else scalar(name, value))
    any_tensor = any(tensor is not None for tensor in tensors)
    of_heads = (HeadScales(1.0, *tensors),) if any_tensor else ()
    return factors[0] * factors[1], factors[2], of_heads


def scales_by_position(args: tuple[Any, ...], q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """`q_scale`, `k_scale` and `v_scale` of ``run(q, k, v, q_scale, k_scale, v_scale)``."""
    if len(args) != 3:
        raise TypeError(
            "run() takes no arguments by position behind the tensors but `q_scale`, `k_scale` and "
            f"`v_scale` where there is no `jit_args`, got {len(args)}"
        )
    for name, named in (("q_scale", q), ("k_scale", k), ("v_scale", v)):
        if named is not None:
            raise TypeError(f"run() got `{name}` both by position and by name")
    return args[0], args[1], args[2]


def _head_scale(name: str, scale: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    if scale.dtype is not torch.float32:
        if not scale.is_floating_point():
            raise ValueError(
                f"`{name}` must be a number or have dtype float32, got {torch_name(scale.dtype)}"
            )
        scale = scale.float()
    if scale.shape not in ((), (1,), (count,)):
        raise ValueError(
            f"`{name}` must be one number or a value for each of {count} heads, got shape "
            f"{list(scale.shape)}"
        )
    if scale.device != device:
        raise ValueError(f"`{name}` must be on {device} as `q` is, got {scale.device}")
    return scale


def positive(name: str, value: Any, default: float) -> float:
    """A positive finite number, `default` for None."""
    if value is None:
        return default
    number = scalar(name, value)
    if number <= 0.0:
        raise ValueError(f"`{name}` must be positive, got {number}")
    return number


def soft_cap(value: Any) -> float:
    """`logits_soft_cap`: None, 0 and what is negative mean none."""
    if value is None:
        return 0.0
    number = scalar("logits_soft_cap", value)
    return max(number, 0.0)


def logits_scale(sm_scale: Any, head_dim_qk: int) -> float:
    """`sm_scale`; one over the root of the head size by default."""
    return 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else scalar("sm_scale", sm_scale)


def refuse(reason: str, **arguments: Any) -> None:
    """Refuse arguments of other backends that are not left at None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"`{name}` must be left out: {reason}")


def check_profile(is_profiled: bool, profiler_buffer: Any) -> None:
    """Refuse a buffer that no kernel writes, or none where one does."""
    if not is_profiled:
        refuse("plan() was not told `use_profiler`", profiler_buffer=profiler_buffer)
        return
    buffer = check_tensor("profiler_buffer", profiler_buffer, 1)
    if buffer.dtype not in (torch.int64, torch.uint64):
        raise ValueError(f"`profiler_buffer` must be uint64 or int64, got {buffer.dtype}")
    if buffer.numel() == 0 or not buffer.is_contiguous():
        raise ValueError("`profiler_buffer` must be contiguous and not empty")


def check_block_scales(kv_dtype: torch.dtype, kv_cache_sf: Any) -> None:
    """Refuse scales of other than 4-bit keys and values, and these without."""
    if kv_dtype == PACKED_FLOAT4 and kv_cache_sf is None:
        raise ValueError("`kv_cache_sf` must be given with `kv_data_type` uint8 (4 bits)")
    if kv_dtype != PACKED_FLOAT4 and kv_cache_sf is not None:
        raise ValueError(
            f"`kv_cache_sf` must be left out with `kv_data_type` {torch_name(kv_dtype)}: it is for "
            "uint8 (4 bits)"
        )


def check_pair_of_scales(kv_cache_sf: Any) -> None:
    """Take scales of 4-bit keys and values that are tensors of their own, or none."""
    if kv_cache_sf is None:
        return
    is_pair = isinstance(kv_cache_sf, (tuple, list)) and len(kv_cache_sf) == 2
    if not is_pair or not all(isinstance(scales, torch.Tensor) for scales in kv_cache_sf):
        raise TypeError(
            "`kv_cache_sf` must be a tuple of two torch.Tensors, of keys and of values, got "
            f"{type(kv_cache_sf).__name__}"
        )


def check_spare_block_tables(block_tables: Any) -> None:
    """Take a block table beside the index tensors, which say the same and are what is read."""
    if block_tables is None:
        return
    if not isinstance(block_tables, torch.Tensor):
        raise TypeError(
            f"`block_tables` must be a torch.Tensor or None, got {type(block_tables).__name__}"
        )
    if block_tables.ndim != 2 or block_tables.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "`block_tables` must be an int32 or int64 matrix, got shape "
            f"{list(block_tables.shape)} of {block_tables.dtype}"
        )


def backend_of_ours(backend: Any) -> Any:
    """The backend for what others name after kernels that serve such calls; others as they are."""
    return "auto" if backend in ("xqa", "trtllm-gen") else backend


def check_counters(counters: Any) -> None:
    """Refuse a buffer of counters that is no tensor; there is no use for one."""
    if counters is not None:
        check_tensor("multi_ctas_kv_counter_buffer", counters)


def check_backend(backend: Any, allowed: Sequence[str] = ("auto", "fa2", "fa3")) -> None:
    """The backends of the attention wrappers, or those that one of them has."""
    if backend in allowed:
        return
    if not isinstance(backend, str):
        raise TypeError(f"`backend` must be a str, got {backend!r}")
    missing = {
        "cutlass": "there are no CUTLASS kernels",
        "cudnn": "cuDNN is not called",
        "trtllm-gen": "its kernels are for Blackwell only",
    }
    reason = f": {missing[backend]}" if backend in missing else ""
    named = [repr(name) for name in allowed]
    choice = f"{', '.join(named[:-1])} or {named[-1]}"
    raise ValueError(f"`backend` must be {choice}, got {backend!r}{reason}")


def variant_from_jit_args(
    jit_args: Sequence[Any] | None, jit_kwargs: Mapping[str, Any] | None
) -> AttentionVariant | None:
    """The variant that a wrapper's `jit_args` describe.

    Raises
    ------
    TypeError, ValueError
        If they are not the 13 of ``gen_customize_batch_prefill_module`` (without `backend`), or
        `jit_kwargs` has a key that is no option.
    """
    options = {
        "pos_encoding_mode",
        "use_sliding_window",
        "use_logits_soft_cap",
        "use_fp16_qk_reduction",
        "fp8_enabled",
    }
    if unknown := sorted(set(jit_kwargs or ()) - options):
        raise ValueError(f"`jit_kwargs` may have {sorted(options)}, got {unknown}")
    if jit_args is None:
        if jit_kwargs:
            raise ValueError("`jit_kwargs` must be left out without `jit_args`")
        return None
    if not isinstance(jit_args, (list, tuple)):
        raise TypeError(f"`jit_args` must be a list, got {type(jit_args).__name__}")
    if len(jit_args) != 13:
        raise ValueError(
            "`jit_args` must be [uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, "
            "head_dim_vo, additional_tensor_names, additional_tensor_dtypes, "
            "additional_scalar_names, additional_scalar_dtypes, variant_name, variant_decl], "
            f"got {len(jit_args)} of these 13"
        )
    return make_variant(jit_args[0], *jit_args[7:])
