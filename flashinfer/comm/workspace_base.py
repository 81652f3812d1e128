"""The interface of workspaces of the fused all-reduce."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from .._compile.handles import Planned


class AllReduceFusionWorkspace(Planned, ABC):
    """Memory of the ranks for `allreduce_fusion`.

    Attributes
    ----------
    world_size, rank : int
        The group, and this process's place in it.
    """

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank = rank
        self._destroyed = False

    @property
    @abstractmethod
    def backend(self) -> str:
        """Name of the backend that takes this workspace."""

    @abstractmethod
    def destroy(self) -> None:
        """Give the memory up. Not collective: other ranks may be gone."""

    @abstractmethod
    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: Any | None = None,
    ) -> bool:
        """Whether an all-reduce of ``[num_tokens, hidden_dim]`` fits."""
