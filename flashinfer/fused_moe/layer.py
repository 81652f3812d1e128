"""A layer of experts that is configured once and called with packs of tensors."""

from __future__ import annotations

import torch

from .._common import checks
from ..compat.backends import BackendSupportedError
from .api import (
    CutlassBf16Config,
    CutlassFp8BlockConfig,
    CutlassFp8PerTensorConfig,
    CutlassW4A16Config,
    MoEActivationPack,
    MoEConfig,
    MoEWeightPack,
)
from .runners import (
    CutlassBf16Runner,
    CutlassFp8BlockRunner,
    CutlassFp8PerTensorRunner,
    CutlassW4A16Runner,
    MoERunner,
)

_ARCH = 90
_RUNNERS: dict[type, type[MoERunner]] = {
    CutlassBf16Config: CutlassBf16Runner,
    CutlassFp8BlockConfig: CutlassFp8BlockRunner,
    CutlassFp8PerTensorConfig: CutlassFp8PerTensorRunner,
    CutlassW4A16Config: CutlassW4A16Runner,
}


class MoELayer:
    """Experts of one configuration, for every batch.

    The formats decide which backend there is, so that nothing is measured: the first one of
    ``config.backend`` that has kernels for them and takes a call's tensors computes it.

    Parameters
    ----------
    config : MoEConfig
        Routing, formats, activation, sizes and backends.
    device : torch.device or str, optional
        A Hopper GPU; the current one if None.

    Raises
    ------
    TypeError, ValueError
        If a part of the configuration has no kernel.
    BackendSupportedError
        A ``ValueError``: if no backend has kernels for the formats, or the GPU is not a Hopper.

    Examples
    --------
    >>> from flashinfer.fused_moe import (CutlassBf16Config, ExpertConfig, MoEActivationPack,
    ...     MoEConfig, MoELayer, MoEWeightPack, QuantConfig, RoutingConfig)
    >>> layer = MoELayer(MoEConfig(RoutingConfig(4, 2), QuantConfig(), ExpertConfig(128)),
    ...     device="cuda")
    >>> w1, w2 = torch.randn(4, 256, 64, device="cuda"), torch.randn(4, 64, 128, device="cuda")
    >>> weights = MoEWeightPack()
    >>> weights.prepare_for("cutlass_bf16", CutlassBf16Config.prepare_weights(w1.bfloat16(),
    ...     w2.bfloat16(), num_local_experts=4, hidden_size=64, intermediate_size=128))
    >>> x = torch.randn(3, 64, device="cuda").bfloat16()
    >>> ids = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32, device="cuda")
    >>> layer(MoEActivationPack(x, None, ids, torch.ones(3, 2, device="cuda")), weights).shape
    torch.Size([3, 64])
    """

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None) -> None:
        if not isinstance(config, MoEConfig):
            raise TypeError(f"`config` must be a MoEConfig, got {type(config).__name__}")
        self.config = config
        self.device = torch.device("cuda" if device is None else device)
        self._winner: str | None = None
        self.refresh_backends()

    def refresh_backends(self) -> None:
        """Make the backends of the configuration again."""
        self.reset_winner()
        fitting = [
            _RUNNERS[type(candidate)]
            for candidate in self.config.backend.valid_for(_ARCH)
            if _RUNNERS[type(candidate)].supports_quant(self.config.quant)
        ]
        if not fitting:
            raise BackendSupportedError(
                f"`config` has no backend for {self.config.quant} among its candidates"
            )
        self._runners = [runner(self.config, self.device) for runner in fitting]

    @property
    def winner_backend(self) -> str | None:
        """The key of the backend that computed the last call; None before the first one."""
        return self._winner

    def reset_winner(self) -> None:
        """Forget which backend computed the last call."""
        self._winner = None

    def __call__(self, act: MoEActivationPack, weights: MoEWeightPack) -> torch.Tensor:
        """The sum of the tokens' experts, ``[tokens, hidden]``, bfloat16.

        Parameters
        ----------
        act : MoEActivationPack
            Tokens, and their experts or logits.
        weights : MoEWeightPack
            Has the view of a backend of this layer.

        Raises
        ------
        TypeError, ValueError
            If a pack does not have what the layer needs, or no backend takes it.
        """
        checks.tensors(hidden_states_q=act.hidden_states_q)
        for runner in self._runners:
            if runner.accepts(act, weights):
                self._winner = runner.backend_key
                return runner.forward(runner.pack_inputs(act, weights))
        keys = ", ".join(runner.backend_key for runner in self._runners)
        raise ValueError(
            f"`weights` must have a view of {keys}, and `act` no scales of activations; got views "
            f"{list(weights.native_views)}"
        )
