"""An implementation of an operation that the tuner can choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from .specs import OptimizationProfile, ProfilingCacheKey, TuningConfig

if TYPE_CHECKING:
    from ..jit.core import JitSpec


class TunableRunner(ABC):
    """One implementation and its tactics.

    A tactic is what JSON can hold: an int, a string, or lists of them. -1 is the choice of the
    runner's own heuristic, which every runner has.
    """

    @abstractmethod
    def get_valid_tactics(
        self, inputs: list[torch.Tensor], profile: OptimizationProfile
    ) -> list[Any]:
        """Tactics that serve inputs of the shapes of `profile`, the likely best one first."""

    @abstractmethod
    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = -1,
        do_preparation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the operation.

        Parameters
        ----------
        inputs : list of torch.Tensor
            As the operation gave them to the tuner.
        tactic
            One of `get_valid_tactics`, or -1.
        do_preparation : bool
            True for one call before a runner's tactics are measured: allocations and the like.
        """

    def __call__(self, inputs: list[torch.Tensor], **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Values that a result depends on besides the shapes; by default the inputs' dtypes.

        Their text is part of the key in files, so it must not contain addresses.
        """
        return tuple(
            str(value.dtype) if isinstance(value, torch.Tensor) else "-" for value in inputs
        )

    def jit_specs(self, inputs: list[torch.Tensor], tactics: list[Any]) -> list[JitSpec]:
        """Modules that these tactics need; the tuner compiles those of all candidates together."""
        return []

    def precompile_tactics(
        self,
        inputs: list[torch.Tensor],
        tactics: list[Any],
        profile: OptimizationProfile,
        **kwargs: Any,
    ) -> bool:
        """Prepare tactics in another way than `jit_specs`; whether there was anything to do."""
        return False


def key_of(
    custom_op: str,
    runner: TunableRunner,
    profile: OptimizationProfile,
    config: TuningConfig,
    inputs: list[Any],
) -> ProfilingCacheKey:
    """The key of a runner's result for a profile."""
    shapes = [list(shape) for shape in profile.get_opt_shapes()]
    for constraint in config.constraint_specs:
        shapes[constraint.input_idx][constraint.dim_idx] = -1
    return ProfilingCacheKey(
        custom_op,
        type(runner).__qualname__,
        0,
        tuple(map(tuple, shapes)),
        tuple(runner.get_cache_key_extras(inputs)),
    )
