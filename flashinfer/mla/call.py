"""Reads the arguments of ``run`` of the MLA wrapper, in the forms that ``plan`` was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._attention.checks import check_profile, refuse, scalar
from .._common.checks import flag as check_flag
from .._common.checks import tensor as check_tensor
from ..jit.attention.mla import FLOAT8
from .problem import MlaOptions, factor

PROFILE_EVENTS = ("load", "keys", "weights", "values", "output")
"""Names of the events in a profile, by their numbers in include/flashinfer/mla/events.cuh."""

_SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar")


class MlaCall(NamedTuple):
    """Arguments of one launch."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor | None
    ckv_cache: torch.Tensor
    kpe_cache: torch.Tensor | None
    sm_scale: float
    o_scale: float
    rope_factor: float
    lse_on_e: bool


@dataclass(frozen=True)
class CallModes:
    """The forms of arguments that every ``run`` of a plan has.

    Attributes
    ----------
    query_layout, kv_cache_layout : str or None
        ``"packed"``: one tensor; ``"split"``: two; None: either.
    scale_mode : str
        ``"bmm-scalar"`` if ``run`` takes `bmm1_scale` and `bmm2_scale`.
    use_sinks : bool
        Whether ``run`` must be given `sinks`.
    """

    query_layout: str | None = None
    kv_cache_layout: str | None = None
    scale_mode: str = "default"
    use_sinks: bool = False

    def queries(
        self, options: MlaOptions, query: Any, q_nope: Any, q_pe: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries in two parts; the second is None if the rotary size is 0."""
        if query is not None or self.query_layout is not None:
            q_nope, q_pe = _parts("query", query, (q_nope, q_pe), self.query_layout, options)
        check_tensor("q_nope", q_nope, 3)
        if options.head_dim_kpe == 0:
            refuse("`head_dim_kpe` is 0", q_pe=_columns(q_pe))
            return q_nope, None
        if q_pe is None:
            check_tensor("q_pe", q_pe)
        return q_nope, q_pe

    def caches(
        self, options: MlaOptions, kv_cache: Any, ckv_cache: Any, kpe_cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Caches in two parts; the second is None if the rotary size is 0."""
        if kv_cache is not None or self.kv_cache_layout is not None:
            given = (ckv_cache, kpe_cache)
            ckv_cache, kpe_cache = _parts(
                "kv_cache", kv_cache, given, self.kv_cache_layout, options
            )
        if ckv_cache is None:
            check_tensor("ckv_cache", ckv_cache)
        if options.head_dim_kpe == 0:
            refuse("`head_dim_kpe` is 0", kpe_cache=_columns(kpe_cache))
            return _without_head(ckv_cache), None
        if kpe_cache is None:
            check_tensor("kpe_cache", kpe_cache)
        return _without_head(ckv_cache), _without_head(kpe_cache)

    def scales(
        self, options: MlaOptions, ckv: Any, kpe: Any, bmm1: Any, bmm2: Any
    ) -> tuple[float, float, float]:
        """Factors of the logits, of the output, and of rotary products beside the first."""
        if ckv is None and kpe is None and bmm1 is None and bmm2 is None:
            return options.sm_scale, 1.0, 1.0
        if self.scale_mode == "bmm-scalar":
            refuse("plan() was told scale_mode 'bmm-scalar'", ckv_scale=ckv, kpe_scale=kpe)
            sm_scale = options.sm_scale if bmm1 is None else factor("bmm1_scale", bmm1)
            return sm_scale, 1.0 if bmm2 is None else scalar("bmm2_scale", bmm2), 1.0
        refuse(
            f"plan() was told scale_mode {self.scale_mode!r}, not 'bmm-scalar'",
            bmm1_scale=bmm1,
            bmm2_scale=bmm2,
        )
        scale = 1.0 if ckv is None else factor("ckv_scale", ckv)
        other = 1.0 if kpe is None else factor("kpe_scale", kpe)
        if not options.head_dim_kpe or other == scale:
            return options.sm_scale * scale, scale, 1.0
        if options.kv_dtype != FLOAT8:
            raise ValueError(f"`kpe_scale` must be the `ckv_scale` {scale}, got {other}")
        return options.sm_scale * scale, scale, other / scale


def read_call_modes(
    query_layout: Any, kv_cache_layout: Any, scale_mode: Any, use_sinks: Any
) -> CallModes:
    """The modes that ``plan`` is told, checked.

    Raises
    ------
    TypeError, ValueError
        If one is not as ``plan`` describes it.
    """
    if scale_mode not in _SCALE_MODES:
        raise ValueError(
            f"`scale_mode` must be 'default', 'kv-per-tensor' or 'bmm-scalar', got {scale_mode!r}"
        )
    for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
        if layout not in (None, "packed", "split"):
            raise ValueError(f"`{name}` must be 'packed', 'split' or None, got {layout!r}")
    return CallModes(query_layout, kv_cache_layout, scale_mode, check_flag("use_sinks", use_sinks))


def refuse_modes(output_scale: Any, skip_softmax: Any) -> None:
    """Refuse the modes of ``plan`` that no kernel here has.

    Raises
    ------
    TypeError, ValueError
        If one is asked for.
    """
    if output_scale != "none":
        raise ValueError(f"`output_scale` must be 'none', got {output_scale!r}")
    if check_flag("skip_softmax", skip_softmax):
        raise ValueError("`skip_softmax` must be False: every weight is computed")


def read_call(
    options: MlaOptions,
    modes: CallModes,
    *,
    q_nope: Any = None,
    q_pe: Any = None,
    ckv_cache: Any = None,
    kpe_cache: Any = None,
    query: Any = None,
    kv_cache: Any = None,
    ckv_scale: Any = None,
    kpe_scale: Any = None,
    bmm1_scale: Any = None,
    bmm2_scale: Any = None,
    sinks: Any = None,
    return_lse_base_on_e: Any = False,
    profiler_buffer: Any = None,
    **of_other_backends: Any,
) -> MlaCall:
    """Arguments of ``run`` in one form.

    Raises
    ------
    TypeError, ValueError
        If one is not as ``run`` describes it.
    """
    refuse("it belongs to another backend", **of_other_backends)
    q_nope, q_pe = modes.queries(options, query, q_nope, q_pe)
    ckv_cache, kpe_cache = modes.caches(options, kv_cache, ckv_cache, kpe_cache)
    sm_scale, o_scale, rope_factor = modes.scales(
        options, ckv_scale, kpe_scale, bmm1_scale, bmm2_scale
    )
    check_profile(options.use_profiler, profiler_buffer)
    if modes.use_sinks and sinks is None:
        raise ValueError("`sinks` must be given: plan() was told `use_sinks`")
    on_e = options.is_lse_on_e(return_lse_base_on_e)
    return MlaCall(q_nope, q_pe, ckv_cache, kpe_cache, sm_scale, o_scale, rope_factor, on_e)


def _parts(
    name: str, both: Any, parts: tuple[Any, Any], layout: str | None, options: MlaOptions
) -> tuple[Any, Any]:
    """The two parts of an operand, which the caller gives as one argument or as two."""
    if both is None:
        if layout == "packed":
            raise ValueError(f"`{name}` must be given as one tensor, as plan() was told")
        return parts
    if parts[0] is not None or parts[1] is not None:
        raise ValueError(f"`{name}` must be left out where its parts are given")
    if isinstance(both, torch.Tensor):
        if layout == "split":
            raise ValueError(f"`{name}` must be a pair of tensors, as plan() was told")
        dims = (options.head_dim_ckv, options.head_dim_kpe)
        if both.ndim != 3 or both.shape[-1] != sum(dims):
            raise ValueError(
                f"`{name}` must have 3 dimensions, the last of {sum(dims)}, got shape "
                f"{list(both.shape)}"
            )
        return both[..., : dims[0]], both[..., dims[0] :] if dims[1] else None
    if not isinstance(both, (tuple, list)) or len(both) != 2:
        raise TypeError(
            f"`{name}` must be a torch.Tensor or a pair of them, got {type(both).__name__}"
        )
    if layout == "packed":
        raise ValueError(f"`{name}` must be one tensor, as plan() was told")
    return both[0], both[1]


def _columns(tensor: Any) -> Any:
    """The tensor, or None if it has no columns."""
    return None if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (0,) else tensor


def _without_head(cache: Any) -> Any:
    """A cache ``[num_pages, page_size, 1, columns]`` without its one head; others as they are."""
    if isinstance(cache, torch.Tensor) and cache.ndim == 4 and cache.shape[2] == 1:
        return cache.squeeze(2)
    return cache
