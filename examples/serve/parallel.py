"""Tensor and expert parallelism: a rank has a part of every layer, sums pass through peer memory.

All ranks run the same program: the same requests, scheduler and draws. Their hidden states are the
same bits, since all-reduce gives these to all ranks, so nothing but the sums needs to be exchanged.
The tables beside the layers say which part of a tensor a rank has: see `division`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from . import kernels
from .config import ModelConfig
from .layers.division import OfExperts, Ranks
from .layers.norm import Norm
from .models import architectures

MAX_TOKENS = 4096


class Parallel:
    """One of the ranks that divide a model; `sum` and `add_norm` are collective.

    Parameters
    ----------
    rank, world_size : int
        Which one, of how many.
    expert_parallel : bool
        Whether a rank has whole experts, rather than a part of each.
    """

    def __init__(self, rank: int, world_size: int, expert_parallel: bool = False) -> None:
        self.rank, self.world_size, self.expert_parallel = rank, world_size, expert_parallel

    def ranks(self, config: ModelConfig) -> Ranks:
        """This rank with a model's table."""
        cuts = architectures()[config.architecture].cuts(config)
        if self.expert_parallel and not any(isinstance(cut, OfExperts) for cut in cuts.values()):
            raise ValueError(
                f"`expert_parallel` must be False: {config.architecture} has no experts"
            )
        return Ranks(self.rank, self.world_size, self.expert_parallel, cuts)

    def open(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Create what the sums need."""

    def sum(self, x: torch.Tensor) -> None:
        """In place, the sum of ``[tokens, hidden_size]`` over the ranks."""
        raise NotImplementedError

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> None:
        """In place, ``residual += sum of x over the ranks`` and ``x = norm(residual)``."""
        self.sum(x)
        norm.add(x, residual)


class TensorParallel(Parallel):
    """The ranks of a process group, each with the GPU that is current. Creation is collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    expert_parallel : bool
        See `Parallel`.

    Attributes
    ----------
    device : str
        This rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, expert_parallel: bool = False) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), expert_parallel)
        self._group = group
        self.device = f"cuda:{torch.cuda.current_device()}"
        self._workspace: Any = None

    def open(self, hidden_size: int, dtype: torch.dtype) -> None:
        self._workspace = kernels.comm.create_allreduce_fusion_workspace(
            "auto",
            self.world_size,
            self.rank,
            MAX_TOKENS,
            hidden_size,
            dtype,
            group=self._group,
        )

    def sum(self, x: torch.Tensor) -> None:
        pattern = kernels.comm.AllReduceFusionPattern.kAllReduce
        kernels.comm.allreduce_fusion(x, self._workspace, pattern, output=x)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> None:
        kernels.comm.allreduce_fusion(
            x,
            self._workspace,
            kernels.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=residual,
            norm_out=x,
            rms_gamma=norm.weight,
            rms_eps=norm.eps,
            weight_bias=float(norm.plus_one),
        )

    def close(self) -> None:
        """Free the memory. Collective."""
        if self._workspace is not None:
            self._workspace.destroy()


def join(world_size: int, expert_parallel: bool = False) -> TensorParallel:
    """The group of the processes that `torchrun` started, each on the GPU of its number.

    Raises
    ------
    ValueError
        If there are not `world_size` processes.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise ValueError(
            f"--tensor-parallel {world_size} needs {world_size} processes, got {started}: start "
            f"with torchrun --nproc-per-node {world_size} -m examples.serve generate ..."
        )
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo")
    return TensorParallel(dist.group.WORLD, expert_parallel)
