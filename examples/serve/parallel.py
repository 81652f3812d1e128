"""Tensor parallelism: each rank has a part of every layer, and sums pass through peer memory.

All ranks run the same program: the same requests, scheduler and draws. Their hidden states are the
same bits, since all-reduce gives these to all ranks, so nothing but the sums needs to be exchanged.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from . import kernels
from .config import ModelConfig

# Rows of weights that are divided, and columns of those that take what these make.
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")
MAX_TOKENS = 4096


class TensorParallel:
    """This rank's part of a model. Creation is collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks, each with the GPU that is current.

    Attributes
    ----------
    device : str
        This rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device = f"cuda:{torch.cuda.current_device()}"
        self._workspace: Any = None

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The shapes of this rank's layers."""
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if getattr(config, name) % self.world_size:
                raise ValueError(
                    f"`{name}` of the model must be a multiple of {self.world_size} ranks, got "
                    f"{getattr(config, name)}"
                )
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.world_size,
            num_kv_heads=config.num_kv_heads // self.world_size,
            intermediate_size=config.intermediate_size // self.world_size,
        )

    def divide(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace the tensors of a checkpoint by this rank's parts."""
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            layer = module.rpartition(".")[2]
            if layer in _ROWS:
                tensors[name] = tensor.chunk(self.world_size)[self.rank].clone()
            elif layer in _COLUMNS and kind == "weight":
                tensors[name] = tensor.chunk(self.world_size, 1)[self.rank].contiguous()
            elif layer in _COLUMNS and self.rank != 0:
                tensors[name] = torch.zeros_like(tensor)  # a bias is added once

    def open(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Create the memory of the sums."""
        self._workspace = kernels.comm.create_allreduce_fusion_workspace(
            "auto",
            self.world_size,
            self.rank,
            MAX_TOKENS,
            hidden_size,
            dtype,
            group=self._group,
        )

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """In place, ``residual += sum of x over the ranks`` and ``x = rmsnorm(residual)``."""
        assert self._workspace is not None
        kernels.comm.allreduce_fusion(
            x,
            self._workspace,
            kernels.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=residual,
            norm_out=x,
            rms_gamma=weight,
            rms_eps=eps,
        )

    def close(self) -> None:
        """Free the memory. Collective."""
        if self._workspace is not None:
            self._workspace.destroy()


def join(world_size: int) -> TensorParallel:
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
    return TensorParallel(dist.group.WORLD)
