"""Merging attention over disjoint sets of keys into attention over all of them.

A state is the output `v` of attention over some keys and its log-sum-exp `s`: the logarithm *to the
base 2* of the sum of the exponentials of the logits, as the attention functions return it. A state
without keys has ``s = -inf``; its `v` is not used.
"""

from typing import Any, cast

import torch

from ..._common import checks
from ..._common.conversions import converted
from ..._common.dtypes import FLOAT, check_dtype
from ..._common.kernels import NOT_LOADED, Kernel, KernelTable
from ..._instrument.decorator import flashinfer_api
from ..._instrument.questions import says_where_it_runs, since
from ...jit.cascade import CascadeConfig, gen_cascade_module
from ...trace.templates.cascade import (
    merge_state_in_place_trace,
    merge_state_trace,
    merge_states_trace,
)


def get_cascade_module() -> Any:
    """The module of `merge_state` for float16, compiled if need be."""
    return gen_cascade_module(CascadeConfig(torch.float16, pair=True)).build_and_load()


def _table(function: str, v: str, *, pair: bool) -> KernelTable:
    """Kernels of `function`, whose argument `v` has the dtype."""

    def get_kernel(dtype: torch.dtype) -> Kernel:
        check_dtype(v, dtype, FLOAT)
        module = gen_cascade_module(CascadeConfig(dtype, pair)).build_and_load()
        return cast(Kernel, getattr(module, function))

    return KernelTable(get_kernel)


_says_where_it_runs = says_where_it_runs(since(75))


_merge_state = _table("merge_state", "v_a", pair=True)


_merge_state_in_place = _table("merge_state_in_place", "v", pair=True)


_merge_states = _table("merge_states", "v", pair=False)


def _like(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Room for a result of the shape of argument `name`."""
    return torch.empty_like(checks.tensor(name, tensor))


@_says_where_it_runs
@flashinfer_api(trace=merge_state_trace)
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Attention over the union of two sets of keys from attention over each.

    .. math:: s = \log_2(2^{s_a} + 2^{s_b}), \quad v = 2^{s_a - s} v_a + 2^{s_b - s} v_b

    Parameters
    ----------
    v_a, v_b : torch.Tensor
        Outputs over either set, ``[num_tokens, num_heads, head_dim]``, float16, bfloat16 or
        float32, last dimension contiguous, other strides free.
    s_a, s_b : torch.Tensor
        Their log-sum-exp, base 2, ``[num_tokens, num_heads]``, float32, or another floating dtype,
        which is converted; any strides.

    Returns
    -------
    v : torch.Tensor
        Shape and dtype of `v_a`. 0 where neither set has keys.
    s : torch.Tensor
        ``[num_tokens, num_heads]``, float32. -inf where neither set has keys.

    Raises
    ------
    TypeError
        If an argument is not a tensor.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above.

    Notes
    -----
    Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding",
    2024. Computed in float32 and rounded once; the larger exponent is subtracted first, so no `s`
    overflows.

    Examples
    --------
    >>> v_a, v_b = torch.randn(2, 16, 32, 128, dtype=torch.bfloat16, device="cuda")
    >>> s_a, s_b = torch.randn(2, 16, 32, device="cuda")
    >>> v, s = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    """
    v, s = _like("v_a", v_a), _like("s_a", s_a)
    try:
        kernel = _merge_state[v_a.dtype]
    except NOT_LOADED:
        kernel = _merge_state.load(v_a=v_a)
    arguments = (v, s, v_a, s_a, v_b, s_b)
    try:
        kernel(*arguments)
    except ValueError:
        v, s, *states = converted(arguments, dict.fromkeys((1, 3, 5), torch.float32))
        kernel(v, s, *states)
    return v, s


@_says_where_it_runs
@flashinfer_api(trace=merge_state_in_place_trace)
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`merge_state` whose result replaces the first state.

    Parameters
    ----------
    v, s : torch.Tensor
        First state, as in `merge_state`; overwritten with the merged one, in its dtype.
    v_other, s_other : torch.Tensor
        Second state; may share no memory with the first.
    mask : torch.Tensor, optional
        ``[num_tokens]``, bool or uint8, any stride: tokens whose value is 0 keep their first
        state. A CUDA graph can so be replayed for batches of which only a part has a second state.

    Raises
    ------
    TypeError, ValueError
        As for `merge_state`.
    """
    try:
        kernel = _merge_state_in_place[v.dtype]
    except NOT_LOADED:
        kernel = _merge_state_in_place.load(v=v)
    arguments = (v, s, v_other, s_other, mask)
    try:
        kernel(*arguments)
    except ValueError:
        _, merged, *others = converted(arguments, {1: torch.float32, 3: torch.float32})
        kernel(v, merged, *others)
        if merged is not s:
            s.copy_(merged)


@_says_where_it_runs
@flashinfer_api(trace=merge_states_trace)
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of several sets of keys from attention over each.

    Parameters
    ----------
    v : torch.Tensor
        Outputs over the sets, ``[num_tokens, num_states, num_heads, head_dim]``, float16, bfloat16
        or float32, last dimension contiguous, other strides free. `num_states` may be 0.
    s : torch.Tensor
        Their log-sum-exp, base 2, ``[num_tokens, num_states, num_heads]``, float32, or another
        floating dtype, which is converted; any strides.

    Returns
    -------
    v_merged : torch.Tensor
        ``[num_tokens, num_heads, head_dim]``, dtype of `v`. 0 where no set has keys.
    s_merged : torch.Tensor
        ``[num_tokens, num_heads]``, float32. -inf where no set has keys.

    Raises
    ------
    TypeError, ValueError
        As for `merge_state`.

    Notes
    -----
    States are merged in their order: the result repeats bit for bit. Source as for `merge_state`.
    """
    checks.tensor("v", v)
    if v.ndim != 4:
        raise ValueError(f"`v` must have 4 dimensions, got shape {list(v.shape)}")
    num_tokens, _, num_heads, head_dim = v.shape
    v_out = torch.empty(num_tokens, num_heads, head_dim, dtype=v.dtype, device=v.device)
    s_out = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=v.device)
    try:
        kernel = _merge_states[v.dtype]
    except NOT_LOADED:
        kernel = _merge_states.load(v=v)
    arguments = (v_out, s_out, v, s)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {3: torch.float32}))
    return v_out, s_out
