"""Mamba's recurrence for one or a few tokens of each sequence, on pools of states.

Per head and channel ``d``, with the state ``S`` of ``[dim, dstate]``::

    dt = softplus(dt + dt_bias)
    S[d] = exp(A[d] * dt[d]) * S[d] + (dt[d] * x[d]) * B
    out[d] = (S[d] C + D[d] * x[d]) * silu(z[d])

Source: T. Dao and A. Gu, "Transformers are SSMs", 2024, and A. Gu and T. Dao, "Mamba: Linear-Time
Sequence Modeling with Selective State Spaces", 2023.
"""

from typing import Any

import torch

from .._common import checks
from .._common.checks import tensor as check_tensor
from .._common.dtypes import FLOAT, check_dtype
from .._instrument.decorator import flashinfer_api
from .._linear_attention.checks import check_backend, destination
from .._linear_attention.selective_state import check_rounding, get_selective_state_kernel
from ..jit.mamba import SCALED, SelectiveStateConfig
from ..trace.templates.mamba import selective_state_update_trace

__all__ = ["selective_state_update"]

_SOFTPLUS, _WRITE_STATE, _WRITE_EVERY_TOKEN = 1, 2, 4


@flashinfer_api(trace=selective_state_update_trace)
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Update states by one or a few tokens per sequence, and give the outputs.

    Parameters
    ----------
    state : torch.Tensor
        Pool ``[slots, heads, dim, dstate]`` (or ``[slots, dim, dstate]`` for one head), float32,
        bfloat16 or float16, or with `state_scale` int16, int8 or float8_e4m3fn; overwritten. Slots
        and heads may be strided; each head's matrix is contiguous. `dstate` is 16, 32, 64, 128 or
        256.
    x : torch.Tensor
        ``[batch, heads, dim]`` or ``[batch, tokens, heads, dim]``, with `cu_seqlens`
        ``[total_tokens, heads, dim]``; ``[batch, dim]`` for one head. bfloat16, float16 or float32,
        last dimension contiguous.
    dt : torch.Tensor
        Shape of `x`, any strides (an expanded tensor is read as it is); any of the float dtypes.
    A : torch.Tensor
        ``[heads, dim, dstate]`` or ``[dim, dstate]``. One number per head, expanded without a copy,
        is recognised and takes less time.
    B, C : torch.Tensor
        As `x`, with ``[groups, dstate]`` in place of ``[heads, dim]``; dtype of `x`. Consecutive
        heads share a group.
    D, dt_bias : torch.Tensor, optional
        ``[heads, dim]`` or ``[dim]``, of one dtype.
    z : torch.Tensor, optional
        Shape and dtype of `x`: the output is multiplied by ``silu(z)``.
    dt_softplus : bool
        Take the softplus of ``dt + dt_bias``.
    state_batch_indices : torch.Tensor, optional
        ``[batch]`` or ``[batch, tokens]``, int32 or int64: slots that are read; by default sequence
        i has slot i. A sequence with `pad_slot_id`, or a slot that the pool has not, is padding:
        its output is zero and no state is touched.
    pad_slot_id : int
        The slot that means none, for reading and for writing.
    state_scale : torch.Tensor, optional
        ``[slots, heads, dim]``, or with a last dimension of 1, float32, for integer and 8-bit
        states: ``state * state_scale`` is the state. Written with the state.
    out : torch.Tensor, optional
        Result, shape and dtype of `x`.
    disable_state_update : bool
        Leave `state` as it is.
    intermediate_states_buffer : torch.Tensor, optional
        ``[rows, steps, heads, dim, dstate]``, dtype of `state`, contiguous: receives the state
        after every token, of packed sequences after the first `steps` of each.
    intermediate_state_indices : torch.Tensor, optional
        ``[batch]``: each sequence's row of that buffer; by default sequence i has row i. One that
        the buffer has not: the states of the sequence are not kept.
    intermediate_state_scales : torch.Tensor, optional
        ``[rows, steps, heads, dim]``, as `state_scale`.
    rand_seed : torch.Tensor, optional
        int64, one element: a float16 or bfloat16 state is rounded to one of its two neighbours at
        random, so that the error is zero on average. The same seed gives the same result. Not with
        `state_scale`.
    philox_rounds : int
        Rounds of the random generator, at least 1 with `rand_seed`.
    cache_steps : int
        Tokens per sequence that the buffers are made for; with `cu_seqlens` the longest sequence.
        Not needed: shapes say the same.
    algorithm : str
        "auto", "simple", "vertical" or "horizontal": accepted, with one kernel for all.
    dst_state_batch_indices : torch.Tensor, optional
        As `state_batch_indices`: slots that are written; by default those that are read. With a
        second dimension, token t's state goes to column t; otherwise the last state is written.
    cu_seqlens : torch.Tensor, optional
        ``[batch + 1]``, int32 or int64: where sequences begin in the packed tokens.
    num_accepted_tokens : torch.Tensor, optional
        ``[batch]``, int32: the state is read from column ``num_accepted_tokens - 1`` of
        `state_batch_indices`.
    backend : str
        "auto" or "flashinfer".

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "auto", "flashinfer")
    if algorithm not in ("auto", "simple", "vertical", "horizontal"):
        raise ValueError(
            f"`algorithm` must be 'auto', 'simple', 'vertical' or 'horizontal', got {algorithm!r}"
        )
    check_tensor("state", state, 3, 4)
    check_dtype("x", check_tensor("x", x, 2, 3, 4).dtype, FLOAT)
    result = destination("out", out, tuple(x.shape), x)
    checks.cuda_tensors(state=state, x=x)
    packed = cu_seqlens is not None
    if packed:
        check_tensor("cu_seqlens", cu_seqlens, 1)
    tokens = {
        name: _by_token(name, tensor, x.ndim, packed)
        for name, tensor in {"x": x, "dt": dt, "B": B, "C": C, "z": z, "out": result}.items()
    }
    pool = state if state.ndim == 4 else state[:, None]
    A = _with_heads("A", A, 3)
    D, dt_bias = (_with_heads(name, t, 2) for name, t in (("D", D), ("dt_bias", dt_bias)))
    _check_indices(state_batch_indices, dst_state_batch_indices, num_accepted_tokens)
    check_rounding(rand_seed, philox_rounds, state_scale)
    written = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    every_token = written is not None and written.ndim == 2 and written.shape[1] > 1
    buffer, scales, steps = _intermediate(
        intermediate_states_buffer,
        intermediate_state_scales,
        intermediate_state_indices,
        checks.count("cache_steps", cache_steps, 0),
        tokens["x"].shape[:2] if cu_seqlens is None else (len(cu_seqlens) - 1, cache_steps),
    )
    kernel = get_selective_state_kernel(
        SelectiveStateConfig(
            x.dtype,
            state.dtype,
            dt.dtype,
            A.dtype,
            torch.float32 if (w := D if D is not None else dt_bias) is None else w.dtype,
            state.shape[-1],
            A.stride(1) == 0 and A.stride(2) == 0,
            rand_seed is not None,
        )
    )
    flags = _SOFTPLUS * checks.flag("dt_softplus", dt_softplus)
    flags += _WRITE_STATE * (not checks.flag("disable_state_update", disable_state_update))
    kernel(
        tokens["out"], tokens["x"], tokens["dt"], A, tokens["B"], tokens["C"],
        (D, tokens["z"], dt_bias),
        (pool, _scale(state_scale, state), rand_seed, philox_rounds),
        (cu_seqlens, state_batch_indices, written, num_accepted_tokens, pad_slot_id),
        (buffer, intermediate_state_indices, scales, steps),
        flags + _WRITE_EVERY_TOKEN * every_token, 0,
    )  # fmt: skip
    return result


def _by_token(name: str, tensor: Any, x_ndim: int, packed: bool) -> Any:
    """[batch, tokens, heads, dim]; packed tokens are one batch."""
    if tensor is None and name == "z":
        return None
    check_tensor(name, tensor, x_ndim)
    if packed:
        if x_ndim != 3:
            raise ValueError(f"`{name}` must have 3 dimensions with `cu_seqlens`, got {x_ndim}")
        return tensor[None]
    if x_ndim == 2:
        return tensor[:, None, None]
    return tensor[:, None] if x_ndim == 3 else tensor


def _with_heads(name: str, tensor: Any, ndim: int) -> Any:
    """With a dimension of one head in front where there is none."""
    if tensor is None:
        return None
    check_tensor(name, tensor, ndim - 1, ndim)
    return tensor if tensor.ndim == ndim else tensor[None]


def _scale(scale: torch.Tensor | None, state: torch.Tensor) -> torch.Tensor | None:
    if scale is None:
        return None
    check_tensor("state_scale", scale, 2, 3, 4)
    if state.dtype not in SCALED:
        raise ValueError(f"`state_scale` must be None for a state of {state.dtype}")
    if scale.ndim == 4:
        if scale.shape[-1] != 1:
            raise ValueError(
                f"`state_scale` must have a last dimension of 1, got shape {list(scale.shape)}"
            )
        scale = scale[..., 0]
    return scale if scale.ndim == 3 else scale[:, None]


def _check_indices(
    indices: torch.Tensor | None, written: torch.Tensor | None, accepted: torch.Tensor | None
) -> None:
    if indices is not None:
        check_tensor("state_batch_indices", indices, 1, 2)
    if written is not None:
        check_tensor("dst_state_batch_indices", written, 1, 2)
    if accepted is not None and (indices is None or indices.ndim != 2):
        raise ValueError("`num_accepted_tokens` needs `state_batch_indices` of two dimensions")


def _intermediate(
    buffer: torch.Tensor | None,
    scales: torch.Tensor | None,
    indices: torch.Tensor | None,
    cache_steps: int,
    sizes: tuple[int, int],
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Buffer and scales with rows and steps in one dimension, and the number of steps.

    `sizes`: sequences and tokens of each that the buffer must hold.
    """
    if buffer is None:
        for name, given in (
            ("intermediate_state_indices", indices),
            ("intermediate_state_scales", scales),
        ):
            if given is not None:
                raise ValueError(f"`{name}` needs `intermediate_states_buffer`")
        return None, None, 0
    checks.contiguous("intermediate_states_buffer", buffer, 5)
    rows, steps = buffer.shape[:2]
    batch, tokens = sizes
    if cache_steps > steps:
        raise ValueError(
            f"`cache_steps` must be at most the {steps} steps of "
            f"`intermediate_states_buffer`, got {cache_steps}"
        )
    if steps < tokens or (indices is None and rows < batch):
        needed = tokens if indices is not None else f"{batch} rows of {tokens}"
        raise ValueError(
            f"`intermediate_states_buffer` must have at least {needed} steps, got shape "
            f"{list(buffer.shape)}"
        )
    if scales is not None:
        checks.contiguous("intermediate_state_scales", scales, 4)
        scales = scales.flatten(0, 1)
    return buffer.flatten(0, 1), scales, steps
