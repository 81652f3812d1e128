"""Prefill of Mamba-2: whole sequences, in chunks of 64 tokens.

Per head, with the state ``S`` of ``[headdim, dstate]``::

    dt = clamp(softplus(dt + dt_bias))
    S = exp(A dt) S + (dt x) B^T;  out = (S C + D x) silu(z)

Products have 16-bit operands and float32 sums; the running state is float32.

Source: T. Dao and A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms
Through Structured State Space Duality", 2024. docs/linear_attention.md says how chunks do it.
"""

import math
from typing import Any

import torch

from .._common.checks import count as check_count
from .._common.checks import tensor as check_tensor
from .._common.dtypes import FLOAT, HALF, check_dtype
from .._instrument.decorator import flashinfer_api
from .._linear_attention.checks import (
    check_backend,
    check_flags,
    check_shapes,
    check_slots,
    destination,
)
from .._linear_attention.ssd import Steps, run_ssd
from ..trace.templates.ssd import ssd_combined_fwd_trace

__all__ = ["SSDCombined", "ssd_combined_fwd"]


@flashinfer_api(trace=ssd_combined_fwd_trace)
def ssd_combined_fwd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    seq_chunk_cumsum: torch.Tensor | None = None,
    update_seq_chunk_cumsum: bool = False,
    checkpoint_token_indices: torch.Tensor | None = None,
    checkpoint_state_slots: torch.Tensor | None = None,
    checkpoint_states: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_final_states: bool = True,
    num_seqs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mamba-2 over the tokens of each sequence.

    Parameters
    ----------
    x : torch.Tensor
        ``[batch, seqlen, heads, headdim]``, float16 or bfloat16; the last dimension is contiguous,
        rows start at multiples of 16 bytes, and `headdim` is a multiple of 64.
    dt : torch.Tensor
        ``[batch, seqlen, heads]``, float32, bfloat16 or float16.
    A : torch.Tensor
        ``[heads]``, float32; negative.
    B, C : torch.Tensor
        ``[batch, seqlen, groups, dstate]``, dtype and layout of `x`; consecutive heads share a
        group, and `dstate` is 64 or 128.
    D : torch.Tensor, optional
        ``[heads]``, float32: how much of `x` is added to the output.
    z : torch.Tensor, optional
        Shape, dtype and layout of `x`: the output is multiplied by ``silu(z)``.
    dt_bias : torch.Tensor, optional
        ``[heads]``, float32, added to `dt`.
    dt_softplus : bool
        Take the softplus of ``dt + dt_bias``.
    dt_limit : tuple of float
        Bounds of `dt`, after the softplus.
    initial_states : torch.Tensor, optional
        ``[sequences, heads, headdim, dstate]``, float32, bfloat16 or float16; zeros if None.
    seq_idx : torch.Tensor, optional
        ``[1, seqlen]``, int32 or int64: the number of each token's sequence, ascending from 0.
        Without it each row of the batch is a sequence.
    chunk_indices, chunk_offsets, seq_chunk_cumsum, update_seq_chunk_cumsum
        Hints of other implementations; results do not depend on them.
    checkpoint_token_indices, checkpoint_state_slots, checkpoint_states
        Not supported: None.
    out : torch.Tensor, optional
        Result, shape and dtype of `x`.
    return_final_states : bool
        Return the states after each sequence's last token as well, in the dtype of
        `initial_states` (float32 without).
    num_seqs : int, optional
        Sequences of `seq_idx`; by default as many as `initial_states` has. One of the two is
        needed.

    Returns
    -------
    tuple
        `out`, and the final states or None.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    for name, value in (
        ("checkpoint_token_indices", checkpoint_token_indices),
        ("checkpoint_state_slots", checkpoint_state_slots),
        ("checkpoint_states", checkpoint_states),
    ):
        if value is not None:
            raise ValueError(f"`{name}` must be None: not supported")
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        check_tensor(name, tensor, 4)
    check_tensor("dt", dt, 3)
    check_flags(dt_softplus=dt_softplus, return_final_states=return_final_states)
    check_dtype("x", x.dtype, HALF)
    result = destination("out", out, tuple(x.shape), x)
    bounds = _bounds(x, seq_idx, num_seqs, initial_states)
    final = None
    if return_final_states:
        dtype = torch.float32 if initial_states is None else initial_states.dtype
        shape = (bounds.shape[0] - 1, x.shape[2], x.shape[3], B.shape[3])
        final = torch.empty(shape, dtype=dtype, device=x.device)
    run_ssd(
        _packed(result) if x.shape[0] == 1 or result.is_contiguous() else _refuse_strides("out"),
        _packed(x),
        Steps(_packed(dt), dt_bias, dt_softplus, _limits(dt_limit)),
        A,
        _packed(B),
        _packed(C),
        D,
        None if z is None else _packed(check_tensor("z", z, 4)),
        initial_states,
        final,
        bounds,
    )
    return result, final


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of the batch one after the other, without a copy where strides allow it."""
    return tensor if tensor.shape[0] == 1 else tensor.reshape(1, -1, *tensor.shape[2:])


def _refuse_strides(name: str) -> torch.Tensor:
    raise ValueError(f"`{name}` must be contiguous for a batch of several rows")


def _limits(limits: object) -> tuple[float, float]:
    if not isinstance(limits, (tuple, list)) or len(limits) != 2:
        raise TypeError(f"`dt_limit` must be a pair of floats, got {limits!r}")
    low, high = (float(limit) for limit in limits)
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"`dt_limit` must ascend, got {(low, high)}")
    return low, high


def _bounds(
    x: torch.Tensor,
    seq_idx: torch.Tensor | None,
    num_seqs: int | None,
    initial_states: torch.Tensor | None,
) -> torch.Tensor:
    """Where sequences begin in the packed tokens, on the device."""
    batch, length = x.shape[:2]
    if initial_states is not None:
        check_tensor("initial_states", initial_states, 4)
    if seq_idx is None:
        if num_seqs not in (None, batch):
            raise ValueError(f"`num_seqs` must be {batch} without `seq_idx`, got {num_seqs}")
        bounds = torch.arange(batch + 1, dtype=torch.int64, device=x.device) * length
    else:
        check_tensor("seq_idx", seq_idx, 2)
        if tuple(seq_idx.shape) != (1, length) or batch != 1:
            raise ValueError(
                f"`seq_idx` must have shape {[1, length]}, and `x` one row, got "
                f"{list(seq_idx.shape)} and {list(x.shape)}"
            )
        if seq_idx.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"`seq_idx` must have dtype int32 or int64, got {seq_idx.dtype}")
        if num_seqs is None and initial_states is None:
            raise ValueError("`seq_idx` needs `num_seqs` or `initial_states`")
        count = initial_states.shape[0] if num_seqs is None else num_seqs  # type: ignore[union-attr]
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"`num_seqs` must be an int from 0 on, got {count!r}")
        numbers = torch.arange(count + 1, dtype=seq_idx.dtype, device=x.device)
        bounds = torch.searchsorted(seq_idx[0].contiguous(), numbers)
    if initial_states is not None and initial_states.shape[0] != bounds.shape[0] - 1:
        raise ValueError(
            f"`initial_states` must have {bounds.shape[0] - 1} sequences, got shape "
            f"{list(initial_states.shape)}"
        )
    return bounds


class SSDCombined:
    """`ssd_combined_fwd` for calls of one form, which are refused if they have another.

    Parameters
    ----------
    chunk_size : int
        Tokens of a chunk as `chunk_indices` counts them; results do not depend on it.
    nheads, headdim, dstate, ngroups : int
        Heads of `x`, channels of a head, elements of a channel's state, and heads of `B` and `C`.
    io_dtype : torch.dtype
        The dtype of `x`, `B`, `C`, `z` and the output is float16 or bfloat16.
    state_dtype : torch.dtype
        The dtype of initial and final states is float32, bfloat16 or float16.
    has_d, has_initial_states, has_varlen, has_z : bool
        Whether calls have `D`, `initial_states`, `seq_idx` and `z`.
    d_has_hdim : bool
        False: `D` is one number per head.
    seq_idx_dtype : torch.dtype
        int32 or int64.
    backend : str
        "cute" or "auto", which are the same here.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """

    def __init__(
        self,
        chunk_size: int,
        nheads: int,
        headdim: int,
        dstate: int,
        ngroups: int,
        io_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.bfloat16,
        has_d: bool = True,
        d_has_hdim: bool = False,
        has_initial_states: bool = False,
        has_varlen: bool = False,
        has_z: bool = False,
        seq_idx_dtype: torch.dtype = torch.int64,
        backend: str = "cute",
    ) -> None:
        self.chunk_size = check_count("chunk_size", chunk_size)
        sizes = {"nheads": nheads, "headdim": headdim, "dstate": dstate, "ngroups": ngroups}
        for name, size in sizes.items():
            check_count(name, size)
        if nheads % ngroups != 0:
            raise ValueError(f"`ngroups` must divide the {nheads} heads, got {ngroups}")
        if d_has_hdim:
            raise ValueError("`d_has_hdim` must be False: `D` is one number per head")
        check_dtype("io_dtype", io_dtype, HALF)
        check_dtype("state_dtype", state_dtype, FLOAT)
        check_dtype("seq_idx_dtype", seq_idx_dtype, (torch.int32, torch.int64))
        check_backend(backend, "cute", "auto")
        self._sizes = sizes
        self._dtypes = {
            **dict.fromkeys(("x", "B", "C", "z", "out"), io_dtype),
            "initial_states": state_dtype,
            "seq_idx": seq_idx_dtype,
        }
        self._given = {
            "D": has_d, "z": has_z, "initial_states": has_initial_states, "seq_idx": has_varlen,
        }  # fmt: skip

    @staticmethod
    def tile_state_size(num_seqs: int) -> int:
        """Elements that `tile_state` of `compute_seq_chunk_cumsum` needs: none."""
        check_count("num_seqs", num_seqs, 0)
        return 0

    @staticmethod
    def compute_seq_chunk_cumsum(
        seq_idx: torch.Tensor,
        chunk_indices: torch.Tensor,
        chunk_offsets: torch.Tensor,
        chunk_size: int,
        num_seqs: int,
        seq_chunk_cumsum: torch.Tensor | None = None,
        tile_state: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """How many logical chunks come before each sequence; `run` does not need it.

        Parameters
        ----------
        seq_idx : torch.Tensor
            ``[1, seqlen]``, int32 or int64: the number of each token's sequence, ascending from 0.
        chunk_indices, chunk_offsets : torch.Tensor
            ``[chunks]``, int32 or int64: logical chunk i, of tokens of one sequence, begins at
            token ``chunk_offsets[i]`` of the `chunk_size` tokens from
            ``chunk_size * chunk_indices[i]`` on.
        chunk_size, num_seqs : int
            Tokens of a chunk, and sequences.
        seq_chunk_cumsum : torch.Tensor, optional
            Result, ``[num_seqs + 1]``, int32.
        tile_state : torch.Tensor, optional
            Scratch of other implementations.

        Returns
        -------
        torch.Tensor
            `seq_chunk_cumsum`; its last element is the number of logical chunks.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as listed above.
        """
        check_slots("seq_idx", seq_idx, 2)
        check_slots("chunk_indices", chunk_indices, 1)
        check_slots("chunk_offsets", chunk_offsets, 1)
        check_shapes(
            seq_idx=(seq_idx, (1, None)), chunk_offsets=(chunk_offsets, tuple(chunk_indices.shape))
        )
        begins = chunk_indices.long() * check_count("chunk_size", chunk_size) + chunk_offsets
        numbers = torch.arange(check_count("num_seqs", num_seqs, 0) + 1, device=seq_idx.device)
        found = torch.searchsorted(seq_idx[0][begins].long(), numbers).int()
        if seq_chunk_cumsum is None:
            return found
        return destination(
            "seq_chunk_cumsum", seq_chunk_cumsum, tuple(found.shape), found
        ).copy_(found)  # fmt: skip

    def run(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        seq_chunk_cumsum: torch.Tensor | None = None,
        update_seq_chunk_cumsum: bool = False,
        checkpoint_token_indices: torch.Tensor | None = None,
        checkpoint_state_slots: torch.Tensor | None = None,
        checkpoint_states: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_final_states: bool = True,
        num_seqs: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`ssd_combined_fwd` with these arguments; final states have the `state_dtype`.

        Raises
        ------
        TypeError, ValueError
            As there, and if a tensor's sizes or dtype are not those of the constructor, or it is
            given where the constructor says that it is not, or the other way round.
        """
        tensors = {"x": x, "B": B, "C": C, "D": D, "z": z, "out": out, "seq_idx": seq_idx}
        self._check({**tensors, "initial_states": initial_states})
        result, final = ssd_combined_fwd(
            x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx,
            chunk_indices, chunk_offsets, seq_chunk_cumsum, update_seq_chunk_cumsum,
            checkpoint_token_indices, checkpoint_state_slots, checkpoint_states, out,
            return_final_states, num_seqs,
        )  # fmt: skip
        return result, None if final is None else final.to(self._dtypes["initial_states"])

    def _check(self, tensors: dict[str, Any]) -> None:
        """Tensors are given, and of the sizes and dtypes, as the constructor says."""
        for name, wanted in self._given.items():
            if (tensors[name] is not None) != wanted:
                state = "given" if wanted else "None"
                raise ValueError(f"`{name}` must be {state}, as the constructor says")
        heads, dim, dstate, groups = self._sizes.values()
        rows = {"x": (heads, dim), "B": (groups, dstate), "C": (groups, dstate)}
        for name, (count, width) in rows.items():
            check_shapes(**{name: (tensors[name], (None, None, count, width))})
        for name, dtype in self._dtypes.items():
            if tensors[name] is not None:
                check_dtype(name, check_tensor(name, tensors[name]).dtype, (dtype,))
