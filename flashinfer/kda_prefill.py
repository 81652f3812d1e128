"""Kimi Delta Attention over prompts, planned or prepared before it runs.

All of it is `flashinfer.kda.recurrent_kda`, which needs no preparation: its kernels read where
sequences begin on the device, and what they leave each other PyTorch allocates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ._common.checks import count as check_count
from ._common.checks import tensor as check_tensor
from .kda_decode import KdaResults, recurrent_kda

__all__ = [
    "KDAPrefillPlanCache",
    "PreparedKDAPrefill",
    "RecurrentKDAPrefillWorkspace",
    "RecurrentKDAPrefillWrapper",
    "kda_prefill_supports_fp32_checkpoints",
    "prepare_bf16_kda_prefill",
    "prepare_tf32_kda_prefill",
]


class RecurrentKDAPrefillWorkspace:
    """Memory of `recurrent_kda` that a caller owns: none is needed, on any device.

    Parameters
    ----------
    device : torch.device or str
        Where the calls run.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)


class RecurrentKDAPrefillWrapper:
    """`recurrent_kda` over packed sequences whose lengths are planned before.

    A CUDA graph that captures `run` follows later plans: each writes the lengths to the same
    memory. The first plan fixes the number of sequences and that of all tokens.

    Parameters
    ----------
    device : torch.device or str
        Where the calls run.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._cu_seqlens: torch.Tensor | None = None
        self._total = 0

    def plan(self, cu_seqlens: torch.Tensor, *, non_blocking: bool = True) -> None:
        """Say where sequences begin; outside of CUDA graphs.

        Parameters
        ----------
        cu_seqlens : torch.Tensor
            ``[sequences + 1]``, int32 or int64, on any device: ascending from 0 to the number of
            tokens.
        non_blocking : bool
            Whether the copy from pinned memory need not be waited for.

        Raises
        ------
        TypeError, ValueError
            If `cu_seqlens` is not as listed above, or a later plan has another number of sequences
            or of tokens than the first.
        """
        if check_tensor("cu_seqlens", cu_seqlens, 1).dtype not in (torch.int32, torch.int64):
            raise ValueError(f"`cu_seqlens` must have dtype int32 or int64, got {cu_seqlens.dtype}")
        bounds = cu_seqlens.tolist()
        if bounds[:1] != [0] or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
            raise ValueError(f"`cu_seqlens` must ascend from 0, got {bounds}")
        if self._cu_seqlens is None:
            self._cu_seqlens = torch.empty(len(bounds), dtype=torch.int64, device=self.device)
            self._total = bounds[-1]
        planned = (len(self._cu_seqlens) - 1, self._total)
        if planned != (len(bounds) - 1, bounds[-1]):
            raise ValueError(
                f"`cu_seqlens` must have {planned[0]} sequences of {planned[1]} tokens together as "
                f"in the first plan, got {len(bounds) - 1} of {bounds[-1]}"
            )
        self._cu_seqlens.copy_(cu_seqlens, non_blocking=non_blocking)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = True,
        use_gate_in_kernel: bool = False,
        lower_bound: float | None = None,
        output: torch.Tensor | None = None,
        beta_is_logit: bool = False,
        state_checkpoints: torch.Tensor | None = None,
        checkpoint_cu_starts: torch.Tensor | None = None,
        checkpoint_every_n_tokens: int = 0,
        checkpoint_state_indices: torch.Tensor | None = None,
        ssm_state_indices: torch.Tensor | None = None,
    ) -> KdaResults:
        """`recurrent_kda` of the planned sequences; arguments and results are those.

        Raises
        ------
        TypeError, ValueError
            As there, and if nothing is planned or `q` has another number of tokens.
        """
        if self._cu_seqlens is None:
            raise ValueError("plan() must be called before run()")
        if check_tensor("q", q, 4).shape[1] != self._total:
            raise ValueError(
                f"`q` must have {self._total} tokens as planned, got shape {list(q.shape)}"
            )
        return recurrent_kda(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, self._cu_seqlens,
            ssm_state_indices,
            output=output,
            beta_is_logit=beta_is_logit,
            state_checkpoints=state_checkpoints,
            checkpoint_cu_starts=checkpoint_cu_starts,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            checkpoint_state_indices=checkpoint_state_indices,
        )  # fmt: skip


def kda_prefill_supports_fp32_checkpoints(
    device: torch.device | str | None = None, *, lower_bound: float | None = None
) -> bool:
    """Whether checkpoints of prompts may be float32: they may, on every device and for all gates.

    Parameters
    ----------
    device : torch.device or str, optional
        Where the calls would run.
    lower_bound : float, optional
        As for `recurrent_kda`.

    Returns
    -------
    bool
    """
    return True


class PreparedKDAPrefill:
    """A call of `recurrent_kda` whose tensors are known: `launch` runs it on the current stream.

    Its results lie in the tensors that the call was prepared with, which must stay alive.
    """

    def __init__(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        self._scalars = dict(scalars)
        self._tensors: dict[str, Any] | None = dict(tensors)

    def rebind(self, tensors: Mapping[str, Any]) -> None:
        """Take other tensors of the same form."""
        self._tensors = dict(tensors)

    def launch(self) -> None:
        """Run the call; a CUDA graph may capture it.

        Raises
        ------
        ValueError
            After `close`.
        """
        if self._tensors is None:
            raise ValueError("`launch` must not be called after `close`")
        recurrent_kda(**self._tensors, **self._scalars)

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors = None


class KDAPrefillPlanCache:
    """Prepared calls by the form of their tensors; the ones that were used last are kept.

    Parameters
    ----------
    capacity : int
        Prepared calls that are kept.
    max_bytes : int, optional
        Bytes that all of them may hold together; None: any number.
    """

    def __init__(self, capacity: int = 64, max_bytes: int | None = None) -> None:
        self._capacity = check_count("capacity", capacity)
        self._max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes, 0)
        self._entries: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def get(self, inputs: Mapping[str, Any] | Iterable[Any], **scalars: Any) -> Any:
        """The prepared call for tensors of this form and these scalars, bound to them; or None."""
        key = _form_of(inputs, scalars)
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        prepared = self._entries[key][0]
        if isinstance(inputs, Mapping) and hasattr(prepared, "rebind"):
            prepared.rebind(inputs)
        return prepared

    def put(
        self,
        prepared: Any,
        inputs: Mapping[str, Any] | Iterable[Any],
        *,
        retained_bytes: int = 0,
        **scalars: Any,
    ) -> None:
        """Keep a prepared call, which holds so many bytes."""
        size = check_count("retained_bytes", retained_bytes, 0, 2**63 - 1)
        key = _form_of(inputs, scalars)
        self._entries.pop(key, None)
        self._entries[key] = (prepared, size)
        while len(self._entries) > self._capacity or self._holds_too_much():
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget all prepared calls."""
        self._entries.clear()

    def _holds_too_much(self) -> bool:
        held = sum(size for _, size in self._entries.values())
        return self._max_bytes is not None and held > self._max_bytes


def _form_of(inputs: Mapping[str, Any] | Iterable[Any], scalars: Mapping[str, Any]) -> Any:
    """What tensors share that one prepared call serves."""
    named = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    forms = tuple(
        (name, x.dtype, x.device, tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor)
        else (name, x)
        for name, x in named
    )  # fmt: skip
    return forms, tuple(sorted(scalars.items()))


def prepare_bf16_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    sequence_lengths: Sequence[int] | None = None,
    state_indices: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    beta_is_logit: bool = True,
    plan_cache: KDAPrefillPlanCache | None = None,
) -> PreparedKDAPrefill:
    """A call of `recurrent_kda` with a gate in the kernel, to be launched later.

    Prompts are walked in chunks as `recurrent_kda` says, whatever the name says.

    Parameters
    ----------
    q, k, v, A_log, dt_bias, scale, lower_bound, cu_seqlens, state_checkpoints, \
checkpoint_cu_starts, checkpoint_every_n_tokens, beta_is_logit
        As for `recurrent_kda`.
    g, beta : torch.Tensor
        As there; tokens beyond those of `q` are not read.
    out : torch.Tensor
        Receives the result.
    initial_state, final_state : torch.Tensor, optional
        Pools of states to read and to write, which may be one. `final_state` needs
        `initial_state`; without it no state is written.
    sequence_lengths : sequence of int, optional
        Lengths of the sequences, on the host.
    state_indices : torch.Tensor, optional
        ``[sequences]``, int32 or int64: slots in both pools; negative: padding.
    plan_cache : KDAPrefillPlanCache, optional
        Keeps prepared calls. One that it has for such tensors is bound to the given ones and
        returned: launch it before the next call of this function.

    Returns
    -------
    PreparedKDAPrefill

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above; `launch` raises the others of `recurrent_kda`.
    """
    required = {"q": (q, 4), "k": (k, 4), "v": (v, 4), "g": (g, 4), "beta": (beta, 3)}
    for name, (tensor, ndim) in required.items():
        check_tensor(name, tensor, ndim)
    check_tensor("A_log", A_log)
    check_tensor("dt_bias", dt_bias, 1, 2)
    check_tensor("out", out, 4)
    tokens, heads, dim = q.shape[1], v.shape[2], q.shape[3]
    for name, tensor in (("g", g), ("beta", beta)):
        if tensor.shape[1] < tokens:
            raise ValueError(f"`{name}` must have {tokens} tokens, got shape {list(tensor.shape)}")
    if dt_bias.numel() != heads * dim:
        raise ValueError(f"`dt_bias` must have {heads} x {dim} elements, got {list(dt_bias.shape)}")
    _check_lengths(sequence_lengths, q, cu_seqlens)
    tensors: dict[str, Any] = {
        **{"q": q, "k": k, "v": v, "g": g[:, :tokens], "beta": beta[:, :tokens]},
        **{"A_log": A_log, "dt_bias": dt_bias.reshape(heads, dim), "output": out},
        "cu_seqlens": cu_seqlens,
        "state_checkpoints": state_checkpoints,
        "checkpoint_cu_starts": checkpoint_cu_starts,
        **_states(initial_state, final_state, state_indices, q),
    }
    scalars: dict[str, Any] = {
        "scale": scale,
        "lower_bound": lower_bound,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
        "beta_is_logit": beta_is_logit,
        "use_gate_in_kernel": True,
        "disable_state_update": final_state is None,
    }
    if plan_cache is None:
        return PreparedKDAPrefill(tensors, scalars)
    prepared = plan_cache.get(tensors, **scalars)
    if prepared is None:
        prepared = PreparedKDAPrefill(tensors, scalars)
        plan_cache.put(prepared, tensors, **scalars)
    assert isinstance(prepared, PreparedKDAPrefill)
    return prepared


def prepare_tf32_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    sequence_lengths: Sequence[int] | None = None,
    state_indices: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    beta_is_logit: bool = True,
) -> PreparedKDAPrefill:
    """`prepare_bf16_kda_prefill` under another name, with its arguments but `plan_cache`.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    return prepare_bf16_kda_prefill(
        q, k, v, g, beta,
        A_log=A_log,
        dt_bias=dt_bias,
        out=out,
        initial_state=initial_state,
        final_state=final_state,
        scale=scale,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        sequence_lengths=sequence_lengths,
        state_indices=state_indices,
        state_checkpoints=state_checkpoints,
        checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        beta_is_logit=beta_is_logit,
    )  # fmt: skip


def _check_lengths(
    lengths: Sequence[int] | None, q: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> None:
    """Refuse lengths on the host that are not those of the call's tensors."""
    if lengths is None:
        return
    packed = cu_seqlens is not None
    sequences = check_tensor("cu_seqlens", cu_seqlens, 1).shape[0] - 1 if packed else q.shape[0]
    total = q.shape[0] * q.shape[1]
    each_fits = packed or all(length == q.shape[1] for length in lengths)
    if len(lengths) != sequences or sum(lengths) != total or min(lengths, default=0) < 0:
        each_fits = False
    if not each_fits:
        raise ValueError(
            f"`sequence_lengths` must be those of {sequences} sequences of {total} tokens "
            f"together, got {list(lengths)}"
        )


def _states(
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    slots: torch.Tensor | None,
    q: torch.Tensor,
) -> dict[str, Any]:
    """Pools and slots as `recurrent_kda` takes them, which writes to the pool that it reads."""
    if initial is None:
        for name, value in (("final_state", final), ("state_indices", slots)):
            if value is not None:
                raise ValueError(f"`{name}` needs `initial_state`")
        return {}
    if final is None or final is initial:
        return {"initial_state": initial, "ssm_state_indices": slots}
    source = torch.arange(len(initial), device=q.device) if slots is None else slots
    return {
        "initial_state": final,
        "ssm_state_indices": slots,
        "initial_state_source": initial,
        "initial_state_indices": source,
    }
