"""Groups of ranks, and what each rank holds of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .._common import checks
from .._instrument.decorator import flashinfer_api

Lengths = Sequence[int] | torch.Tensor
LAYOUTS = ("HND", "NHD")


def group_size(group: dist.ProcessGroup | None) -> int:
    """The number of ranks; no group is one rank."""
    return 1 if group is None else dist.get_world_size(group)


def _lengths(name: str, lengths: Lengths) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        checks.tensor(name, lengths, 1)
        lengths = lengths.tolist()
    if not isinstance(lengths, (list, tuple)) or not lengths:
        raise TypeError(f"`{name}` must be a list of one or more lengths, got {lengths!r}")
    return [checks.count(name, int(n) if type(n) is torch.Tensor else n, 0) for n in lengths]


def _part(length: int, world_size: int, rank: int) -> tuple[int, int]:
    """Where a rank's tokens of a sequence begin and end: as many for each, the last ones fewer."""
    share = -(-length // world_size)
    return min(rank * share, length), min((rank + 1) * share, length)


def _current_device() -> torch.device:
    # Without a GPU the reference backend computes.
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def _offsets(rows: list[list[int]]) -> torch.Tensor:
    lengths = torch.tensor(rows, dtype=torch.int32)
    offsets = torch.nn.functional.pad(lengths.cumsum(-1, dtype=torch.int32), (1, 0))
    return offsets.to(_current_device())


@flashinfer_api
def split_varlen_input(
    tensor: torch.Tensor,
    seq_len_list: Lengths,
    world_size: int,
    rank: int,
    tensor_layout: str = "HND",
) -> torch.Tensor:
    """A rank's part of sequences that are divided one by one, for ring attention.

    Rank r has tokens ``r * share`` to ``(r + 1) * share`` of each sequence, as far as these exist,
    where share is its length divided by the number of ranks, rounded up.

    Parameters
    ----------
    tensor : torch.Tensor
        ``[heads, tokens, head_dim]`` (HND) or ``[tokens, heads, head_dim]`` (NHD): the sequences
        one after another.
    seq_len_list : list of int or torch.Tensor
        Tokens of each sequence; their sum is that of `tensor`.
    world_size, rank : int
        The number of parts, and which one.
    tensor_layout : {"HND", "NHD"}
        Order of the dimensions.

    Returns
    -------
    torch.Tensor
        The parts one after another, and zeros up to the tokens that rank 0 has.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    checks.tensor("tensor", tensor, 3)
    checks.choice("tensor_layout", tensor_layout, LAYOUTS)
    checks.count("world_size", world_size)
    checks.count("rank", rank, 0, world_size - 1)
    lengths = _lengths("seq_len_list", seq_len_list)
    dim = LAYOUTS.index(tensor_layout) ^ 1
    if sum(lengths) != tensor.shape[dim]:
        raise ValueError(
            f"`seq_len_list` must have the sum {tensor.shape[dim]}, the tokens of `tensor`, got "
            f"{sum(lengths)}"
        )
    parts = [_part(length, world_size, rank) for length in lengths]
    pieces = [
        sequence.narrow(dim, begin, end - begin)
        for sequence, (begin, end) in zip(tensor.split(lengths, dim), parts, strict=True)
    ]
    padding = list(tensor.shape)
    most = sum(_part(length, world_size, 0)[1] for length in lengths)
    padding[dim] = most - sum(end - begin for begin, end in parts)
    return torch.cat([*pieces, tensor.new_zeros(padding)], dim)


@flashinfer_api
def ulysses_varlen_config(
    seq_lens_q: Lengths, seq_lens_kv: Lengths
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets of sequences whose concatenation the ranks of a Ulysses group divide.

    Parameters
    ----------
    seq_lens_q, seq_lens_kv : list of int or torch.Tensor
        Tokens of each sequence.

    Returns
    -------
    tuple
        Offsets of queries and of keys, ``[sequences + 1]``, int32, on the current GPU; tokens of
        the longest sequence of either, for `VarlenCPConfig`.

    Raises
    ------
    TypeError, ValueError
        If the lengths are not as listed above.
    """
    q, kv = _lengths("seq_lens_q", seq_lens_q), _lengths("seq_lens_kv", seq_lens_kv)
    _check_as_many(q, kv)
    return _offsets([q])[0], _offsets([kv])[0], max(q), max(kv)


@flashinfer_api
def ring_varlen_config(
    seq_lens_q: Lengths, seq_lens_kv: Lengths, ring_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets of the parts that `split_varlen_input` gives the ranks of a ring.

    Parameters
    ----------
    seq_lens_q, seq_lens_kv : list of int or torch.Tensor
        Tokens of each sequence.
    ring_group : torch.distributed.ProcessGroup, optional
        The ranks; None: one.

    Returns
    -------
    tuple
        Offsets of queries and of keys among the tokens of each rank,
        ``[ring_size, sequences + 1]``, int32, on the current GPU; tokens of the longest part of
        either, for `VarlenCPConfig`.

    Raises
    ------
    TypeError, ValueError
        If the lengths are not as listed above.
    """
    q, kv = _lengths("seq_lens_q", seq_lens_q), _lengths("seq_lens_kv", seq_lens_kv)
    _check_as_many(q, kv)
    world_size = group_size(ring_group)
    by_rank = [
        [
            [end - begin for begin, end in (_part(n, world_size, rank) for n in lengths)]
            for rank in range(world_size)
        ]
        for lengths in (q, kv)
    ]
    return _offsets(by_rank[0]), _offsets(by_rank[1]), max(by_rank[0][0]), max(by_rank[1][0])


def _check_as_many(q: list[int], kv: list[int]) -> None:
    if len(q) != len(kv):
        raise ValueError(
            f"`seq_lens_kv` must have as many lengths as `seq_lens_q`, {len(q)}, got {len(kv)}"
        )


@flashinfer_api
def uneven_cp_config(
    seq_len: int,
    seq_len_padded: int,
    seq_len_cur_rank: int,
    ulysses_group: dist.ProcessGroup | None = None,
    ring_group: dist.ProcessGroup | None = None,
) -> torch.Tensor | None:
    """Tokens without padding of each rank of the ring, for `UnevenCPConfig`. Collective.

    Parameters
    ----------
    seq_len, seq_len_padded : int
        Tokens of the sequence without and with padding.
    seq_len_cur_rank : int
        Tokens of this rank without padding.
    ulysses_group, ring_group : torch.distributed.ProcessGroup, optional
        As for `ParallelAttention`.

    Returns
    -------
    torch.Tensor or None
        ``[ring_size]``, int32, on the host: the sum over a Ulysses group for each rank of the ring.
        None without a ring.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or the ranks' tokens are not those of the sequence.
    """
    checks.count("seq_len_padded", seq_len_padded)
    checks.count("seq_len", seq_len, 1, seq_len_padded)
    checks.count("seq_len_cur_rank", seq_len_cur_rank, 0, seq_len)
    if group_size(ring_group) == 1:
        return None
    is_nccl = dist.get_backend(ring_group) == "nccl"
    device = _current_device() if is_nccl else torch.device("cpu")
    own = torch.tensor([seq_len_cur_rank], dtype=torch.int32, device=device)
    if group_size(ulysses_group) > 1:
        dist.all_reduce(own, group=ulysses_group)
    parts = own.new_empty(group_size(ring_group))
    dist.all_gather_into_tensor(parts, own, group=ring_group)
    parts = parts.cpu()
    if int(parts.sum()) != seq_len:
        raise ValueError(
            f"`seq_len_cur_rank` must have the sum `seq_len` {seq_len} over the ranks, got "
            f"{parts.tolist()} by rank of the ring"
        )
    return parts


@flashinfer_api
def get_parallel_groups(
    ulysses_size: int, ring_size: int, device_type: str = "cuda"
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The groups of ranks of `ParallelAttention`. Collective.

    Neighbouring ranks are a Ulysses group, and those at the same place of neighbouring groups are a
    ring. More ranks than ``ulysses_size * ring_size`` are several such sets.

    Parameters
    ----------
    ulysses_size, ring_size : int
        Ranks of a group; their product divides the number of processes.
    device_type : str
        Type of the devices whose tensors are exchanged.

    Returns
    -------
    tuple
        The ring and the Ulysses group of this rank, each None if it would have one rank.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    sizes = {
        "ring": checks.count("ring_size", ring_size),
        "ulysses": checks.count("ulysses_size", ulysses_size),
    }
    world_size, ranks = dist.get_world_size(), ring_size * ulysses_size
    if world_size % ranks:
        raise ValueError(
            f"`ulysses_size` * `ring_size` must divide the {world_size} processes, got {ranks}"
        )
    if ranks == 1:
        return None, None
    sizes = {"set": world_size // ranks, **sizes}
    used = {name: size for name, size in sizes.items() if size > 1}
    mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    ring, ulysses = (mesh.get_group(n) if n in used else None for n in ("ring", "ulysses"))
    return ring, ulysses
