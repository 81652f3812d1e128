"""``ParallelAttention``: attention whose queries and keys several ranks hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._attention.functions.merge import merge_state_in_place
from .._attention.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .._common import checks
from .._common.dtypes import FLOAT
from .._instrument.decorator import flashinfer_api, flashinfer_constructor
from ..compat.backends import BackendSupportedError
from .exchange import Ring, gather_heads, scatter_heads
from .parallel_config import UnevenCPConfig, VarlenCPConfig
from .utils import LAYOUTS, group_size

_BACKENDS = {"flash-attn3": "fa3", "fa3": "fa3", "fa2": "fa2", "auto": "auto"}
_WORKSPACE_BYTES = 128 << 20
_MOST_PLANS = 64

Lengths = tuple[int, ...]


class _Parts(NamedTuple):
    """Tokens of each sequence that this rank asks for, and that each rank of the ring has."""

    queries: Lengths
    keys: list[Lengths]


class ParallelAttention:
    """Attention over sequences that are divided among ranks.

    In a Ulysses group each rank gives its tokens of the other ranks' heads for the other ranks'
    tokens of its heads, computes these heads, and gives the result back. In a ring each rank keeps
    its queries, keys and values go around, and what each part of the keys gives is merged by its
    log-sum-exp, in float32; a message is on its way while the part before it is computed. With
    both, the heads are exchanged first, and the ring's ranks divide what Ulysses groups hold.

    Construction is local; every :meth:`run` is collective.

    Parameters
    ----------
    attn_type : {"auto", "fa2", "fa3", "flash-attn3"}
        The kernel: the best, the portable one, or that for Hopper (two names).
    ulysses_group, ring_group : torch.distributed.ProcessGroup or None
        The result of `get_parallel_groups`; None stands for one rank.
    uneven_cp_config : UnevenCPConfig, optional
        The length of a sequence with padding at its end.
    varlen_cp_config : VarlenCPConfig, optional
        The lengths of several sequences, of a Ulysses group alone or of a ring alone. Either
        configuration may be changed between calls.
    fuse_qkv : bool
        Exchange the heads of queries, keys and values in one message, not in three: fewer launches,
        and one copy of each tensor more.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: for "cutlass", which is for Blackwell.

    Notes
    -----
    Jacobs et al., "DeepSpeed Ulysses", 2023; Liu et al., "Ring Attention with Blockwise
    Transformers for Near-Infinite Context", 2023; Fang and Zhao, "USP: A Unified Sequence
    Parallelism Approach for Long Context Generative AI", 2024.

    Examples
    --------
    >>> attention = flashinfer.parallel_attention.ParallelAttention("auto", None, None)
    >>> x = torch.randn(17, 8, 128, dtype=torch.float16, device="cuda")
    >>> attention.run(x, x, x, tensor_layout="NHD").shape
    torch.Size([17, 8, 128])
    """

    @flashinfer_constructor
    def __init__(
        self,
        attn_type: str,
        ulysses_group: dist.ProcessGroup | None,
        ring_group: dist.ProcessGroup | None,
        uneven_cp_config: UnevenCPConfig | None = None,
        varlen_cp_config: VarlenCPConfig | None = None,
        fuse_qkv: bool = False,
    ) -> None:
        if attn_type == "cutlass":
            raise BackendSupportedError("`attn_type` 'cutlass' is for Blackwell: take 'auto'")
        self.attn_type = checks.choice("attn_type", attn_type, tuple(_BACKENDS))
        self.ulysses_group, self.ring_group = ulysses_group, ring_group
        self.uneven_cp_config = _config("uneven_cp_config", uneven_cp_config, UnevenCPConfig)
        self.varlen_cp_config = _config("varlen_cp_config", varlen_cp_config, VarlenCPConfig)
        self.fuse_qkv = checks.flag("fuse_qkv", fuse_qkv)
        self._workspace: torch.Tensor | None = None
        self._plans: dict[Any, BatchPrefillWithRaggedKVCacheWrapper] = {}
        self._read: tuple[Any, list[Any]] = (None, [])
        self._agreed: set[Any] = set()

    @flashinfer_api
    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensor_layout: str,
        attn_mask: None = None,
        is_causal: bool = False,
        return_lse: bool = False,
        cur_rank_cu_seqlens_q: None = None,
        cur_rank_cu_seqlens_k: None = None,
        cur_rank_max_seqlen_q: int = 0,
        cur_rank_max_seqlen_k: int = 0,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks. Collective.

        Parameters
        ----------
        query : torch.Tensor
            ``[heads, tokens, head_dim]`` (HND) or ``[tokens, heads, head_dim]`` (NHD): this rank's,
            float16, bfloat16 or float32, which is computed in float16. All ranks have the same
            shapes, dtypes and arguments. The Ulysses group divides the heads.
        key, value : torch.Tensor
            In the same layout, of the same dtype, with as many heads or a divisor of them.
        tensor_layout : {"HND", "NHD"}
            Order of the dimensions.
        attn_mask : None
            Masks are not supported.
        is_causal : bool
            Whether a token sees no later token of its sequence, whichever rank has that. In a ring
            the last ranks then compute most.
        return_lse : bool
            False.
        cur_rank_cu_seqlens_q, cur_rank_cu_seqlens_k, cur_rank_max_seqlen_q, cur_rank_max_seqlen_k
            Left as they are: the configurations say what they would.

        Returns
        -------
        torch.Tensor
            Like `query`, with the head size of `value`; zeros for padding.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as listed above, or the ranks' differ.
        """
        _refuse_unused(
            kwargs,
            attn_mask=(attn_mask, None),
            return_lse=(return_lse, False),
            cur_rank_cu_seqlens_q=(cur_rank_cu_seqlens_q, None),
            cur_rank_cu_seqlens_k=(cur_rank_cu_seqlens_k, None),
            cur_rank_max_seqlen_q=(cur_rank_max_seqlen_q, 0),
            cur_rank_max_seqlen_k=(cur_rank_max_seqlen_k, 0),
        )
        checks.choice("tensor_layout", tensor_layout, LAYOUTS)
        checks.flag("is_causal", is_causal)
        ulysses = group_size(self.ulysses_group)
        tensors = _checked(query, key, value, tensor_layout, ulysses)
        parts = self._parts(tensors[0].shape[0] * ulysses, tensors[1].shape[0] * ulysses, is_causal)
        self._agree(tensors, parts, is_causal)
        if query.dtype == torch.float32:
            tensors = [tensor.half() for tensor in tensors]
        q, k, v = scatter_heads(tensors, self.ulysses_group, together=self.fuse_qkv)
        out = gather_heads(self._around(q, k, v, parts, is_causal), self.ulysses_group)
        out = out.transpose(0, 1).contiguous() if tensor_layout == "HND" else out
        return out.to(query.dtype)

    def _parts(self, queries: int, keys: int, is_causal: bool) -> _Parts:
        """Tokens of each rank; `queries` and `keys` count those after the exchange and padding."""
        ring = group_size(self.ring_group)
        rank = 0 if self.ring_group is None else dist.get_rank(self.ring_group)
        uneven, varlen = self.uneven_cp_config, self.varlen_cp_config
        if uneven is not None and uneven.seq_len is not None:
            parts = self._uneven_parts(uneven, queries, ring)
            found = _Parts((parts[rank],), [(part,) for part in parts])
        elif varlen is not None and _has_offsets(varlen):
            found = self._varlen_parts(varlen, ring, rank)
        else:
            found = _Parts((queries,), [(keys,)] * ring)
        for name, have, lengths in (
            ("query", queries, found.queries),
            *(("key", keys, part) for part in found.keys),
        ):
            if sum(lengths) > have:
                raise ValueError(
                    f"`{name}` must have at least the {sum(lengths)} tokens that the configuration "
                    f"gives the ranks of a Ulysses group, got {have}"
                )
        if is_causal and ring > 1 and found.queries != found.keys[rank]:
            raise ValueError(
                "`is_causal` in a ring takes as many keys as queries of each sequence, got "
                f"{found.keys[rank]} and {found.queries} on rank {rank}"
            )
        return found

    def _uneven_parts(self, config: UnevenCPConfig, tokens: int, ring: int) -> list[int]:
        padded = config.seq_len_padded
        if padded is not None and padded != tokens * ring:
            raise ValueError(
                f"`seq_len_padded` must be {tokens * ring}, the tokens of all ranks, got {padded}"
            )
        if ring == 1:
            return [checks.count("seq_len", config.seq_len)]
        if config.seq_len_cur_ring_group is None:
            raise ValueError("`seq_len_cur_ring_group` must be given for a ring, it is None")
        (parts,) = self._values(seq_len_cur_ring_group=config.seq_len_cur_ring_group)
        if len(parts) != ring:
            raise ValueError(
                f"`seq_len_cur_ring_group` must have {ring} elements, one for each rank of the "
                f"ring, got {len(parts)}"
            )
        return parts

    def _varlen_parts(self, config: VarlenCPConfig, ring: int, rank: int) -> _Parts:
        group = "ring" if ring > 1 else "ulysses"
        if ring > 1 and group_size(self.ulysses_group) > 1:
            raise ValueError(
                "`varlen_cp_config` divides sequences in a Ulysses group or in a ring, not in both"
            )
        names = [f"cu_seqlens_{kind}_cur_{group}_group" for kind in ("q", "kv")]
        given = {name: getattr(config, name) for name in names}
        for name, offsets in given.items():
            if offsets is None:
                raise ValueError(f"`{name}` of `varlen_cp_config` must be given, it is None")
            checks.tensor(name, offsets, 2 if ring > 1 else 1)
            if ring > 1 and offsets.shape[0] != ring:
                raise ValueError(f"`{name}` must have {ring} rows, got {offsets.shape[0]}")
        q, kv = self._values(**given)
        q, kv = (q, kv) if ring > 1 else ([q], [kv])
        return _Parts(_differences(names[0], q[rank]), [_differences(names[1], row) for row in kv])

    def _values(self, **tensors: torch.Tensor) -> list[Any]:
        """Values of tensors, read from the GPU once as long as they are the same."""
        seen = [(tensor, tensor._version) for tensor in tensors.values()]
        last, values = self._read
        if last is None or [(id(t), n) for t, n in last] != [(id(t), n) for t, n in seen]:
            for name, tensor in tensors.items():
                checks.dtype(name, tensor.dtype, (torch.int32, torch.int64))
            values = [tensor.tolist() for tensor in tensors.values()]
            self._read = seen, values
        return values

    def _agree(self, tensors: list[torch.Tensor], parts: _Parts, is_causal: bool) -> None:
        """Compare what is new with the other ranks, which would else wait for other bytes."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        call = (*shapes, tensors[0].dtype, is_causal, self.fuse_qkv)
        if (call, *parts.keys) in self._agreed:
            return
        for group in (self.ulysses_group, self.ring_group):
            if group is not None:
                calls: list[Any] = [None] * group_size(group)
                dist.all_gather_object(calls, (call, parts.keys), group=group)
                if any(other != calls[0] for other in calls):
                    raise ValueError(f"ranks must call `run` alike, got by rank {calls}")
        if len(self._agreed) == _MOST_PLANS:
            self._agreed.clear()  # on all ranks, whose calls are the same
        self._agreed.add((call, *parts.keys))

    def _around(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: _Parts, is_causal: bool
    ) -> torch.Tensor:
        """The result of all queries that are here, zeros after the last sequence."""
        ring = Ring(k, v, self.ring_group)
        tokens = sum(parts.queries)
        state: tuple[torch.Tensor, torch.Tensor] | None = None
        for step in range(ring.size):
            if step + 1 < ring.size:
                ring.send()
            own, lengths = ring.source == ring.rank, parts.keys[ring.source]
            is_later = is_causal and ring.source > ring.rank
            if tokens and any(lengths) and not is_later:
                k, v = ring.keys_and_values()
                part = self._attention(
                    q[:tokens], k, v, parts.queries, lengths, is_causal and own, ring.size > 1
                )
                state = _merged(state, part)
            if step + 1 < ring.size:
                ring.receive()
        if state is None:
            return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        out = state[0].to(q.dtype)
        padding = q.shape[0] - tokens
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

    def _attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Lengths,
        keys: Lengths,
        is_causal: bool,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over one rank's keys, and its log-sum-exp if it is one of several."""
        heads = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        planned = (queries, keys, heads, q.dtype, is_causal)
        wrapper = self._plans.get(planned)
        if wrapper is None:
            if len(self._plans) == _MOST_PLANS:
                self._plans.clear()
            if self._workspace is None:
                self._workspace = q.new_empty(_WORKSPACE_BYTES, dtype=torch.uint8)
            wrapper = BatchPrefillWithRaggedKVCacheWrapper(
                self._workspace, "NHD", backend=_BACKENDS[self.attn_type]
            )
            qo_indptr, kv_indptr = (
                torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
                for lengths in (queries, keys)
            )
            wrapper.plan(qo_indptr, kv_indptr, *heads, causal=is_causal, q_data_type=q.dtype)
            self._plans[planned] = wrapper
        tokens = sum(keys)
        if return_lse:
            return wrapper.run(q, k[:tokens], v[:tokens], return_lse=True)
        return wrapper.run(q, k[:tokens], v[:tokens]), None


def _merged(
    state: tuple[torch.Tensor, torch.Tensor] | None,
    part: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state with one part of the keys more; sums of several parts are kept in float32."""
    out, lse = part
    if lse is None:
        return out, out.new_empty(0)
    if state is None:
        return out.float(), lse
    merge_state_in_place(*state, out.float(), lse)
    return state


def _checked(
    query: Any, key: Any, value: Any, layout: str, ulysses_size: int
) -> list[torch.Tensor]:
    """The tensors as ``[tokens, heads, head_dim]``."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        checks.tensor(name, tensor, 3)
        checks.dtype(name, tensor.dtype, FLOAT if name == "query" else (query.dtype,))
    heads = 0 if layout == "HND" else 1
    tensors = {
        name: tensor.transpose(0, 1) if layout == "HND" else tensor
        for name, tensor in named.items()
    }
    for name, tensor in tensors.items():
        if tensor.shape[1] % ulysses_size:
            raise ValueError(
                f"`{name}` must have a multiple of {ulysses_size} heads, the ranks of the Ulysses "
                f"group, got {named[name].shape[heads]}"
            )
    q, k, v = tensors.values()
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"`key` must have a divisor of {q.shape[1]} heads, got {k.shape[1]}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"`value` must have the tokens and heads of `key`, got shapes {list(value.shape)} and "
            f"{list(key.shape)}"
        )
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"`key` must have head size {q.shape[2]}, got {k.shape[2]}")
    return [q, k, v]


def _config(name: str, value: Any, kind: type) -> Any:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {kind.__name__} or None, got {type(value).__name__}")
    return value


def _has_offsets(config: VarlenCPConfig) -> bool:
    """Whether any offsets are given."""
    values = vars(config).items()
    return any(value is not None for name, value in values if name.startswith("cu_seqlens"))


def _differences(name: str, offsets: list[int]) -> Lengths:
    lengths = tuple(end - begin for begin, end in zip(offsets, offsets[1:], strict=False))
    if offsets[:1] != [0] or not lengths or min(lengths) < 0:
        raise ValueError(f"`{name}` must begin with 0 and not decrease, got {offsets}")
    return lengths


def _refuse_unused(unknown: dict[str, Any], **arguments: tuple[Any, Any]) -> None:
    if unknown:
        raise TypeError(f"`run` has no argument {', '.join(f'`{name}`' for name in unknown)}")
    for name, (value, only) in arguments.items():
        if value is not only and (only is None or value != only):
            raise ValueError(f"`{name}` must be {only}, got {value!r}")
