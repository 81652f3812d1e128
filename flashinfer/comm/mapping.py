"""How ranks are arranged in groups: tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

from typing import Any


class Mapping:
    """The groups of one rank, in TensorRT-LLM's order: pipeline, then context, then tensor.

    Parameters
    ----------
    world_size, rank : int
        All ranks, and this one.
    gpus_per_node : int
        Ranks of one host.
    cp_size, tp_size, pp_size : int
        Context, tensor and pipeline parallelism; their product is `world_size`.
    cp_config : dict, optional
        Kept as given.
    moe_cluster_size, moe_tp_size, moe_ep_size : int
        How experts divide a tensor-parallel group; -1: what the others leave.
    attn_tp_size, attn_cp_size : int
        How attention divides it; -1: `tp_size` and `cp_size`.
    auto_parallel, enable_attention_dp : bool
        Kept as given.

    Raises
    ------
    ValueError
        If the sizes do not fit together.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: dict[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        moe_cluster_size = 1 if moe_cluster_size == -1 else moe_cluster_size
        if moe_tp_size == -1 and moe_ep_size == -1:
            moe_ep_size = 1
        if moe_tp_size == -1:
            moe_tp_size = tp_size // (moe_ep_size * moe_cluster_size)
        if moe_ep_size == -1:
            moe_ep_size = tp_size // (moe_tp_size * moe_cluster_size)
        _check_product("world_size", world_size, pp_size * cp_size * tp_size)
        _check_product("tp_size", tp_size, moe_tp_size * moe_ep_size * moe_cluster_size)
        self.world_size, self.gpus_per_node = world_size, gpus_per_node
        self.rank = rank
        self.cp_size, self.cp_config = cp_size, dict(cp_config or {})
        self.tp_size, self.pp_size = tp_size, pp_size
        self.moe_cluster_size = moe_cluster_size
        self.moe_tp_size, self.moe_ep_size = moe_tp_size, moe_ep_size
        self.attn_tp_size = tp_size if attn_tp_size == -1 else attn_tp_size
        self.attn_cp_size = cp_size if attn_cp_size == -1 else attn_cp_size
        _check_product("attn_tp_size", self.attn_tp_size * self.attn_cp_size, tp_size * cp_size)
        self.auto_parallel, self.enable_attention_dp = auto_parallel, enable_attention_dp

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.world_size, self.rank, self.tp_size, self.pp_size, self.cp_size))

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`rank` must be from 0 to {self.world_size - 1}, got {rank}")
        self._rank = rank

    @property
    def tp_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        """Place in the context-parallel group."""
        return self.rank % (self.tp_size * self.cp_size) // self.tp_size

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_tp_rank(self) -> int:
        """Place among the ranks that share an expert."""
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_cluster_rank(self) -> int:
        """Place in the cluster of experts."""
        return self.tp_rank % self.moe_cluster_size

    @property
    def moe_ep_rank(self) -> int:
        """Place among the ranks that divide the experts."""
        return self.tp_rank // self.moe_cluster_size % self.moe_ep_size

    @property
    def tp_group(self) -> list[int]:
        """Ranks of the tensor-parallel group."""
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))

    @property
    def cp_group(self) -> list[int]:
        """Ranks of the context-parallel group."""
        first = self.rank - self.cp_rank * self.tp_size
        return [first + i * self.tp_size for i in range(self.cp_size)]

    @property
    def pp_group(self) -> list[int]:
        """Ranks of the pipeline."""
        step = self.tp_size * self.cp_size
        return [self.rank % step + i * step for i in range(self.pp_size)]

    @property
    def moe_tp_group(self) -> list[int]:
        """Ranks that share this rank's experts."""
        step = self.moe_ep_size * self.moe_cluster_size
        first = self.rank - self.moe_tp_rank * step
        return [first + i * step for i in range(self.moe_tp_size)]

    @property
    def moe_ep_group(self) -> list[int]:
        """Ranks that divide the experts with this one."""
        first = self.rank - self.moe_ep_rank * self.moe_cluster_size
        return [first + i * self.moe_cluster_size for i in range(self.moe_ep_size)]

    @property
    def moe_cluster_group(self) -> list[int]:
        """Ranks of this rank's cluster of experts."""
        first = self.rank - self.moe_cluster_rank
        return list(range(first, first + self.moe_cluster_size))

    @property
    def node_rank(self) -> int:
        """Number of this rank's host."""
        return self.get_node_rank(self.rank)

    @property
    def local_rank(self) -> int:
        """Place on the host."""
        return self.get_local_rank(self.rank)

    def get_node_rank(self, rank: int) -> int:
        """Number of the host of `rank`."""
        return rank // self.gpus_per_node

    def get_local_rank(self, rank: int) -> int:
        """Place of `rank` on its host."""
        return rank % self.gpus_per_node

    def is_multi_node(self) -> bool:
        """Whether there are more ranks than one host has."""
        return self.world_size > self.gpus_per_node

    def has_cp(self) -> bool:
        """Whether there is context parallelism."""
        return self.cp_size > 1

    def has_tp(self) -> bool:
        """Whether there is tensor parallelism."""
        return self.tp_size > 1

    def has_pp(self) -> bool:
        """Whether there is a pipeline."""
        return self.pp_size > 1

    def has_moe_cluster(self) -> bool:
        """Whether experts are in clusters."""
        return self.moe_cluster_size > 1

    def has_moe_tp(self) -> bool:
        """Whether ranks share experts."""
        return self.moe_tp_size > 1

    def has_moe_ep(self) -> bool:
        """Whether ranks divide the experts."""
        return self.moe_ep_size > 1

    def is_first_pp_rank(self) -> bool:
        """Whether the pipeline begins here."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Whether the pipeline ends here."""
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        """Whether the next stage is the last one."""
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        """Rank of the stage before, around the pipeline."""
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """Rank of the stage after, around the pipeline."""
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        """Layers of this stage; the first stages take one more each if they do not divide."""
        each, more = divmod(num_layers, self.pp_size)
        first = self.pp_rank * each + min(self.pp_rank, more)
        return list(range(first, first + each + (self.pp_rank < more)))

    def ep_experts(self, num_experts: int) -> list[int]:
        """Experts of this rank."""
        if num_experts % self.moe_ep_size:
            raise ValueError(
                f"`num_experts` must be a multiple of {self.moe_ep_size}, got {num_experts}"
            )
        each = num_experts // self.moe_ep_size
        return list(range(self.moe_ep_rank * each, (self.moe_ep_rank + 1) * each))

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Mapping:
        """The inverse of `to_dict`."""
        return cls(**mapping)

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        names = (
            "world_size rank gpus_per_node cp_size cp_config tp_size pp_size moe_cluster_size "
            "moe_tp_size moe_ep_size attn_tp_size attn_cp_size auto_parallel enable_attention_dp"
        )
        return {name: getattr(self, name) for name in names.split()}


def _check_product(name: str, value: int, expected: int) -> None:
    if value != expected:
        raise ValueError(f"`{name}` must be the product of its parts, {expected}, got {value}")
