"""Generators under FlashInfer's names: of built-in options, and of a user's variant.

What they describe is a module of :func:`gen_attention_module` for the most usual call of its kind.
The loaded module, an :class:`AttentionModule`, knows its configuration and variant, by which
functions that take it find the modules of other masks and tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..core import JitSpec
from .config import POS_ENCODINGS, AttentionConfig
from .hopper import hopper_tile_q
from .modules import gen_attention_module
from .variant import make_variant


def pos_encoding_name(mode: int) -> str:
    """Name in ``AttentionConfig`` of a value of ``flashinfer.utils.PosEncodingMode``."""
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise TypeError(f"`pos_encoding_mode` must be an int, got {mode!r}")
    if not 0 <= mode < len(POS_ENCODINGS):
        raise ValueError(f"`pos_encoding_mode` must be 0, 1 or 2, got {mode}")
    return POS_ENCODINGS[mode]


def _config(
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    *,
    decode: bool = False,
    **fields: Any,
) -> AttentionConfig:
    """`decode`: one query token per request; else many, causal."""
    large = head_dims[1] > 128
    tile_q = 16 if decode or max(head_dims) > 256 else 64 if large else 128
    if fields.get("backend") == "fa3":
        tile_q = hopper_tile_q(*head_dims, types[0])
    return AttentionConfig(
        *types,
        *head_dims,
        tile_q=tile_q,
        mask_mode="none" if decode else "causal",
        pos_encoding=pos_encoding_name(pos_encoding_mode),
        sliding_window=use_sliding_window,
        logits_soft_cap=use_logits_soft_cap,
        **fields,
    )


def _check(
    idtype: torch.dtype = torch.int32,
    backend: str = "fa2",
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
) -> None:
    if idtype != torch.int32:
        raise ValueError(f"`idtype` must be torch.int32, got {idtype}")
    if backend not in ("auto", "fa2", "fa3"):
        raise ValueError(f"`backend` must be 'auto', 'fa2' or 'fa3', got {backend!r}")
    if use_fp16_qk_reduction or fp8_enabled:
        raise ValueError(
            "`use_fp16_qk_reduction` and `fp8_enabled` must be False: logits are summed in "
            "float32, of queries of 16 bits"
        )


def _named(backend: str) -> str:
    """The backend of a module that is asked for by name: one that runs everywhere, for auto."""
    return "fa3" if backend == "fa3" else "fa2"


# --- Built-in options ---------------------------------------------------------------------------


def gen_single_decode_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> JitSpec:
    """The module of ``single_decode_with_kv_cache``; `pos_encoding_mode`: 0, 1 or 2."""
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = (pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    return gen_attention_module(_config(types, head_dims, *options, decode=True, paged=False))


def gen_batch_decode_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> JitSpec:
    """The module of ``BatchDecodeWithPagedKVCacheWrapper``."""
    _check(dtype_idx)
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = (pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    return gen_attention_module(_config(types, head_dims, *options, decode=True))


def gen_single_prefill_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_fp16_qk_reduction: bool,
) -> JitSpec:
    """The module of ``single_prefill_with_kv_cache`` for a long causal prompt."""
    _check(backend=backend, use_fp16_qk_reduction=use_fp16_qk_reduction)
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = (pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    return gen_attention_module(
        _config(types, head_dims, *options, paged=False, backend=_named(backend))
    )


def gen_batch_prefill_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_fp16_qk_reduction: bool,
) -> JitSpec:
    """The module of ``BatchPrefillWithPagedKVCacheWrapper`` for long causal prompts."""
    _check(dtype_idx, backend, use_fp16_qk_reduction)
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = (pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    return gen_attention_module(_config(types, head_dims, *options, backend=_named(backend)))


def gen_batch_prefill_attention_sink_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
) -> JitSpec:
    """The same with attention sinks."""
    _check(dtype_idx, backend)
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = (pos_encoding_mode, use_sliding_window, False)
    return gen_attention_module(
        _config(types, head_dims, *options, sinks=True, backend=_named(backend))
    )


def gen_batch_attention_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
    use_profiler: bool,
) -> JitSpec:
    """The module of ``BatchAttention``: tiles of two shapes in one launch."""
    _check(dtype_idx)
    if not isinstance(use_profiler, bool):
        raise TypeError(f"`use_profiler` must be a bool, got {type(use_profiler).__name__}")
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = (pos_encoding_mode, False, use_logits_soft_cap)
    config = _two_shapes(types, head_dims, options, options, "causal")
    return gen_attention_module(dataclasses.replace(config, profiled=use_profiler))


def gen_pod_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim: int,
    pos_encoding_mode_p: int,
    use_sliding_window_p: bool,
    use_logits_soft_cap_p: bool,
    use_fp16_qk_reduction: bool,
    dtype_idx: torch.dtype,
    pos_encoding_mode_d: int,
    use_sliding_window_d: bool,
    use_logits_soft_cap_d: bool,
) -> JitSpec:
    """The module of ``PODWithPagedKVCacheWrapper``; what prefills and what decodes have options
    of their own."""
    _check(dtype_idx, use_fp16_qk_reduction=use_fp16_qk_reduction)
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim, head_dim)
    prefill = (pos_encoding_mode_p, use_sliding_window_p, use_logits_soft_cap_p)
    decode = (pos_encoding_mode_d, use_sliding_window_d, use_logits_soft_cap_d)
    return gen_attention_module(_two_shapes(types, head_dims, prefill, decode, "none"))


def gen_batch_pod_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim: int,
    pos_encoding_mode_p: int,
    use_sliding_window_p: bool,
    use_logits_soft_cap_p: bool,
    use_fp16_qk_reduction: bool,
    dtype_idx: torch.dtype,
    pos_encoding_mode_d: int,
    use_sliding_window_d: bool,
    use_logits_soft_cap_d: bool,
) -> JitSpec:
    """The module of ``BatchPODWithPagedKVCacheWrapper``, which is that of the other."""
    return gen_pod_module(
        dtype_q,
        dtype_kv,
        dtype_o,
        head_dim,
        pos_encoding_mode_p,
        use_sliding_window_p,
        use_logits_soft_cap_p,
        use_fp16_qk_reduction,
        dtype_idx,
        pos_encoding_mode_d,
        use_sliding_window_d,
        use_logits_soft_cap_d,
    )


def _two_shapes(
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
    first: tuple[int, bool, bool],
    second: tuple[int, bool, bool],
    mask_second: str,
) -> AttentionConfig:
    pos_encoding_mode, use_sliding_window, use_logits_soft_cap = second
    return _config(
        types,
        head_dims,
        *first,
        paged=True,
        tile_q_second=16,
        mask_mode_second=mask_second,
        pos_encoding_second=pos_encoding_name(pos_encoding_mode),
        sliding_window_second=use_sliding_window,
        logits_soft_cap_second=use_logits_soft_cap,
    )


# --- Users' variants ----------------------------------------------------------------------------


def gen_customize_single_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: list[str],
    additional_tensor_dtypes: list[str],
    additional_scalar_names: list[str],
    additional_scalar_dtypes: list[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
) -> JitSpec:
    """A module for ``single_decode_with_kv_cache_with_jit_module``.

    Parameters
    ----------
    uri : str
        Name of the variant: letters, digits and ``_``.
    additional_tensor_names, additional_tensor_dtypes : list of str
        Members of ``params`` in the hooks, and the C++ types of their elements, such as ``float``.
    additional_scalar_names, additional_scalar_dtypes : list of str
        The same for scalars.
    variant_name, variant_decl : str
        The struct's name, and C++ source that declares it; see docs/variants.md.
    pos_encoding_mode : int
        0, or 1 to rotate queries and keys.
    use_sliding_window : bool
        Whether the kernel masks keys outside ``params.window_left``.
    use_logits_soft_cap : bool
        Must be False: the variant's LogitsTransform takes its place.
    """
    variant = make_variant(
        uri,
        additional_tensor_names,
        additional_tensor_dtypes,
        additional_scalar_names,
        additional_scalar_dtypes,
        variant_name,
        variant_decl,
    )
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = _custom_options(pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    config = _config(types, head_dims, *options, decode=True, paged=False, custom_variant=True)
    return gen_attention_module(config, variant)


def gen_customize_batch_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: list[str],
    additional_tensor_dtypes: list[str],
    additional_scalar_names: list[str],
    additional_scalar_dtypes: list[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
) -> JitSpec:
    """The module that ``BatchDecodeWithPagedKVCacheWrapper(jit_args=...)`` uses."""
    _check(idtype)
    variant = make_variant(
        uri,
        additional_tensor_names,
        additional_tensor_dtypes,
        additional_scalar_names,
        additional_scalar_dtypes,
        variant_name,
        variant_decl,
    )
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = _custom_options(pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    config = _config(types, head_dims, *options, decode=True, custom_variant=True)
    return gen_attention_module(config, variant)


def gen_customize_single_prefill_module(
    backend: str,
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: list[str],
    additional_tensor_dtypes: list[str],
    additional_scalar_names: list[str],
    additional_scalar_dtypes: list[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
) -> JitSpec:
    """A module for ``single_prefill_with_kv_cache_with_jit_module``."""
    _check(torch.int32, backend, use_fp16_qk_reduction, fp8_enabled)
    variant = make_variant(
        uri,
        additional_tensor_names,
        additional_tensor_dtypes,
        additional_scalar_names,
        additional_scalar_dtypes,
        variant_name,
        variant_decl,
    )
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = _custom_options(pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    config = _config(
        types, head_dims, *options, paged=False, custom_variant=True, backend=_named(backend)
    )
    return gen_attention_module(config, variant)


def gen_customize_batch_prefill_module(
    backend: str,
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: list[str],
    additional_tensor_dtypes: list[str],
    additional_scalar_names: list[str],
    additional_scalar_dtypes: list[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
    paged_kv_stride_mode: str = "runtime",
    module_surface: str = "full",
) -> JitSpec:
    """The module that ``BatchPrefillWithPagedKVCacheWrapper(jit_args=...)`` uses.

    `paged_kv_stride_mode` (``"runtime"``, ``"equal"``, ``"independent"``) and `module_surface`
    (``"full"``, ``"paged"``) select nothing: strides are run-time arguments, and the module is of
    paged keys alone.
    """
    _check(idtype, backend, use_fp16_qk_reduction, fp8_enabled)
    if paged_kv_stride_mode not in ("runtime", "equal", "independent"):
        raise ValueError(
            "`paged_kv_stride_mode` must be 'runtime', 'equal' or 'independent', got "
            f"{paged_kv_stride_mode!r}"
        )
    if module_surface not in ("full", "paged"):
        raise ValueError(f"`module_surface` must be 'full' or 'paged', got {module_surface!r}")
    variant = make_variant(
        uri,
        additional_tensor_names,
        additional_tensor_dtypes,
        additional_scalar_names,
        additional_scalar_dtypes,
        variant_name,
        variant_decl,
    )
    types, head_dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    options = _custom_options(pos_encoding_mode, use_sliding_window, use_logits_soft_cap)
    config = _config(types, head_dims, *options, custom_variant=True, backend=_named(backend))
    return gen_attention_module(config, variant)


def _custom_options(
    pos_encoding_mode: int, use_sliding_window: bool, use_logits_soft_cap: bool
) -> tuple[int, bool, bool]:
    if use_logits_soft_cap:
        raise ValueError(
            "`use_logits_soft_cap` must be False: the variant's LogitsTransform takes its place"
        )
    if pos_encoding_mode not in (0, 1):
        raise ValueError(f"`pos_encoding_mode` must be 0 or 1, got {pos_encoding_mode!r}")
    return pos_encoding_mode, use_sliding_window, False


# --- Names of modules ---------------------------------------------------------------------------


def _uri_of(generator: Callable[..., JitSpec]) -> Callable[..., str]:
    """A function of the generator's arguments that says the name of its module."""

    @functools.wraps(generator)
    def get_uri(*args: Any, **kwargs: Any) -> str:
        return generator(*args, **kwargs).name

    get_uri.__name__ = get_uri.__qualname__ = generator.__name__.replace("gen_", "get_").replace(
        "_module", "_uri"
    )
    get_uri.__doc__ = f"Name of the module that ``{generator.__name__}`` describes."
    return get_uri


get_single_decode_uri = _uri_of(gen_single_decode_module)
get_batch_decode_uri = _uri_of(gen_batch_decode_module)
get_single_prefill_uri = _uri_of(gen_single_prefill_module)
get_batch_prefill_uri = _uri_of(gen_batch_prefill_module)
get_batch_prefill_attention_sink_uri = _uri_of(gen_batch_prefill_attention_sink_module)
get_batch_attention_uri = _uri_of(gen_batch_attention_module)
get_pod_uri = _uri_of(gen_pod_module)
