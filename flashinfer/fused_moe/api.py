"""The parts of a layer of experts: routing, formats, activation, sizes and backends, as values."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, get_args

import torch

from .._common import checks
from ..tllm_enums import ActivationType, RoutingInputMode, RoutingMethodType
from . import prepare

FLOAT32_MAX = 3.4028234663852886e38


class QuantFormat(enum.Enum):
    """Format of weights, activations or results."""

    BF16 = 0
    """bfloat16."""
    FP16 = 1
    """float16."""
    FP8PerTensor = 2
    """float8_e4m3fn, a factor for a whole tensor."""
    DeepSeekFp8 = 3
    """float8_e4m3fn, a factor for 128 by 128 elements of a weight, or 128 of a row."""
    MXFP8 = 4
    """float8_e4m3fn, a power of two for 32 elements."""
    NVFP4 = 5
    """e2m1, a float8_e4m3fn factor for 16 elements, and one for the tensor."""
    MXFP4 = 6
    """e2m1, a power of two for 32 elements."""
    MXINT4 = 7
    """4-bit integers, a power of two for 32 elements."""
    INT4 = 8
    """4-bit integers, a factor for a group."""


@dataclass(frozen=True)
class RoutingConfig:
    """How tokens get their experts.

    Attributes
    ----------
    num_experts, top_k : int
        Experts of all ranks, and those of a token.
    method : RoutingMethodType
        What logits become; nothing where the experts are given.
    n_group, topk_group : int, optional
        Groups of neighbouring experts and how many are kept, for DeepSeekV3.
    routed_scaling_factor : float, optional
        A factor of the weights that logits become; 1 if None.
    """

    num_experts: int
    top_k: int
    method: RoutingMethodType = RoutingMethodType.Default
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None

    def __post_init__(self) -> None:
        checks.count("num_experts", self.num_experts, 1)
        checks.count("top_k", self.top_k, 1, self.num_experts)


@dataclass(frozen=True)
class QuantConfig:
    """Formats of weights, activations and the result.

    Attributes
    ----------
    weight, activation, output : QuantFormat
        A layer on Hopper gives bfloat16.
    swizzled_scale_factors, per_token_scale : bool, optional
        Layout and kind of activation scales that no backend here has: None or False.
    nvfp4_4over6 : optional
        None: how 4-bit activations are rounded, which no backend here has.
    """

    weight: QuantFormat = QuantFormat.BF16
    activation: QuantFormat = QuantFormat.BF16
    output: QuantFormat = QuantFormat.BF16
    _: KW_ONLY
    swizzled_scale_factors: bool | None = None
    per_token_scale: bool | None = None
    nvfp4_4over6: Any = None

    def __post_init__(self) -> None:
        for name in ("weight", "activation", "output"):
            if not isinstance(getattr(self, name), QuantFormat):
                raise TypeError(f"`{name}` must be a QuantFormat, got {getattr(self, name)!r}")

    @property
    def pair(self) -> tuple[QuantFormat, QuantFormat]:
        """Formats of weights and activations."""
        return self.weight, self.activation


@dataclass(frozen=True)
class ActivationConfig:
    """The step between the products; each kind has its class.

    A layer on Hopper has kernels for `SwiGLU`, `GeGLU`, `ReLU2` and `Identity`, and refuses the
    others by name when it is made. A gated activation takes values u and gates g, others x.
    """

    type: ClassVar[ActivationType] = ActivationType.InvalidType

    @property
    def is_gated(self) -> bool:
        """Whether it takes two halves of the first product's columns."""
        return self.type.is_gated


@dataclass(frozen=True)
class SwiGLU(ActivationConfig):
    """``g sigmoid(alpha g) (u + beta)``, g bounded from above and u on both sides by `limit`."""

    type: ClassVar[ActivationType] = ActivationType.Swiglu
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = FLOAT32_MAX


@dataclass(frozen=True)
class GeGLU(ActivationConfig):
    """``gelu(g) u``."""

    type: ClassVar[ActivationType] = ActivationType.Geglu


@dataclass(frozen=True)
class GeGLUTanh(ActivationConfig):
    """``gelu(g) u`` with the tanh approximation of gelu: no kernel here."""

    type: ClassVar[ActivationType] = ActivationType.GegluTanh


@dataclass(frozen=True)
class SwiGLUStep(ActivationConfig):
    """``silu(g) u``, silu(g) bounded from above and u on both sides by `limit`: no kernel here."""

    type: ClassVar[ActivationType] = ActivationType.SwigluStep
    limit: float = 7.0


@dataclass(frozen=True)
class SiTU(ActivationConfig):
    """``b tanh(g / b) sigmoid(g) c tanh(u / c)``: no kernel here.

    b is `gate_scale` and c `linear_scale`; u itself is the second factor where that is None.
    """

    type: ClassVar[ActivationType] = ActivationType.Situ
    gate_scale: float = 4.0
    linear_scale: float | None = 25.0
    clamp_limit: float | None = None


@dataclass(frozen=True)
class GELU(ActivationConfig):
    """``x Phi(x)`` with the normal distribution Phi: no kernel here."""

    type: ClassVar[ActivationType] = ActivationType.Gelu


@dataclass(frozen=True)
class ReLU(ActivationConfig):
    """``max(x, 0)``: no kernel here."""

    type: ClassVar[ActivationType] = ActivationType.Relu


@dataclass(frozen=True)
class SiLU(ActivationConfig):
    """``x sigmoid(x)``: no kernel here."""

    type: ClassVar[ActivationType] = ActivationType.Silu


@dataclass(frozen=True)
class ReLU2(ActivationConfig):
    """``max(x, 0)^2``."""

    type: ClassVar[ActivationType] = ActivationType.Relu2


@dataclass(frozen=True)
class Identity(ActivationConfig):
    """``x``."""

    type: ClassVar[ActivationType] = ActivationType.Identity


@dataclass(frozen=True)
class ExpertConfig:
    """Sizes of the experts, and which of them are here.

    Attributes
    ----------
    intermediate_size : int
        Elements between the products.
    local_expert_offset : int
        Number of the first expert that is here: a multiple of `local_num_experts`.
    local_num_experts : int, optional
        Experts that are here; all if None.
    num_fused_shared_experts : int
        0: shared experts are not fused here.
    """

    intermediate_size: int
    local_expert_offset: int = 0
    local_num_experts: int | None = None
    num_fused_shared_experts: int = 0

    def __post_init__(self) -> None:
        checks.count("intermediate_size", self.intermediate_size, 1)
        checks.count("local_expert_offset", self.local_expert_offset, 0)


@dataclass(frozen=True)
class MoEFinalizeConfig:
    """How a token's results are summed.

    Attributes
    ----------
    do_finalize : bool
        True: a layer here gives sums.
    use_fused_finalize : bool
        Changes nothing: sums have a fixed order.
    """

    do_finalize: bool = True
    use_fused_finalize: bool = True


@dataclass(frozen=True)
class ExecutionConfig:
    """How a layer is launched.

    Attributes
    ----------
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it.
    tune_max_num_tokens : int
        Largest batch of a tuner.
    """

    enable_pdl: bool | None = None
    tune_max_num_tokens: int = 8192


class _HopperConfig:
    """A backend of this library."""

    @staticmethod
    def supported(arch: int) -> bool:
        """Whether there are kernels for a compute capability such as 90."""
        return arch == 90


@dataclass(frozen=True)
class CutlassBf16Config(_HopperConfig):
    """bfloat16 weights and activations."""

    prepare_weights = staticmethod(prepare.prepare_cutlass_bf16_weights)


@dataclass(frozen=True)
class CutlassFp8BlockConfig(_HopperConfig):
    """8-bit weights with factors of 128 by 128 elements, bfloat16 activations."""

    prepare_weights = staticmethod(prepare.prepare_cutlass_fp8_block_weights)


@dataclass(frozen=True)
class CutlassFp8PerTensorConfig(_HopperConfig):
    """8-bit weights and activations with a factor for each tensor."""

    prepare_weights = staticmethod(prepare.prepare_cutlass_fp8_per_tensor_weights)
    prepare_activations = staticmethod(prepare.prepare_cutlass_fp8_per_tensor_activations)


@dataclass(frozen=True)
class CutlassW4A16Config(_HopperConfig):
    """MXFP4 weights, bfloat16 activations."""

    prepare_weights = staticmethod(prepare.prepare_cutlass_w4a16_weights)


BackendConfigType = (
    CutlassBf16Config | CutlassFp8BlockConfig | CutlassFp8PerTensorConfig | CutlassW4A16Config
)


@dataclass(frozen=True)
class BackendOptions:
    """Backends in the order in which they are tried.

    Attributes
    ----------
    candidates : tuple
        Instances of the ``Cutlass*Config`` classes; every one if it is empty.
    """

    candidates: tuple[BackendConfigType, ...] = ()

    def __post_init__(self) -> None:
        for candidate in self.candidates:
            if not isinstance(candidate, get_args(BackendConfigType)):
                names = ", ".join(kind.__name__ for kind in get_args(BackendConfigType))
                raise TypeError(f"`candidates` must be of {names}, got {candidate!r}")

    def valid_for(self, arch: int) -> list[BackendConfigType]:
        """The candidates that have kernels for a compute capability such as 90."""
        kinds = self.candidates or tuple(kind() for kind in get_args(BackendConfigType))
        return [candidate for candidate in kinds if candidate.supported(arch)]


@dataclass(frozen=True)
class MoEConfig:
    """Everything that is fixed when a layer is made.

    Attributes
    ----------
    routing, quant, experts, activation, backend, execution, finalize
        The parts.
    """

    routing: RoutingConfig
    quant: QuantConfig
    experts: ExpertConfig
    activation: ActivationConfig = field(default_factory=SwiGLU)
    backend: BackendOptions = field(default_factory=BackendOptions)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    finalize: MoEFinalizeConfig = field(default_factory=MoEFinalizeConfig)

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):
            kind = globals()[str(part.type)]
            if not isinstance(getattr(self, part.name), kind):
                raise TypeError(
                    f"`{part.name}` must be a {kind.__name__}, got {getattr(self, part.name)!r}"
                )

    def keys(self) -> list[str]:
        """The names of the parts."""
        return [part.name for part in dataclasses.fields(self)]


@dataclass
class MoEActivationPack:
    """One call's tokens and their experts.

    Attributes
    ----------
    hidden_states_q : torch.Tensor
        ``[tokens, hidden]`` in the format of the layer's activations; bfloat16 for DeepSeekFp8.
    hidden_states_scale : torch.Tensor or None
        None: no backend here reads scales of activations.
    topk_ids : torch.Tensor, optional
        ``[tokens, top_k]``: int32 or int64 experts; without `topk_weights` int32 with the expert in
        the upper 16 bits and its weight, a bfloat16, in the lower ones.
    topk_weights : torch.Tensor, optional
        ``[tokens, top_k]``, float32 or bfloat16.
    per_token_scale : None
        No backend here reads it.
    routing_input_mode : RoutingInputMode
        Whether the experts are given (packed or not) or follow from logits.
    routing_logits, routing_bias : torch.Tensor, optional
        ``[tokens, num_experts]`` and ``[num_experts]``: what the experts follow from.
    """

    hidden_states_q: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    _: KW_ONLY
    per_token_scale: torch.Tensor | None = None
    routing_input_mode: RoutingInputMode = RoutingInputMode.PackedPrecomputed
    routing_logits: torch.Tensor | None = None
    routing_bias: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the activations."""
        return int(self.hidden_states_q.shape[0])


@dataclass
class MoEWeightPack:
    """The weights of a layer, in the form that each backend reads.

    Attributes
    ----------
    native_views : dict
        Tensors by name, by the backend's key.
    """

    native_views: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def prepare_for(self, backend_key: str, view: dict[str, torch.Tensor]) -> None:
        """Keep what `prepare_weights` of a backend gave."""
        self.native_views[backend_key] = view

    def get_view(self, backend_key: str) -> dict[str, torch.Tensor]:
        """The tensors of a backend.

        Raises
        ------
        KeyError
            If there are none.
        """
        if backend_key not in self.native_views:
            known = ", ".join(self.native_views) or "none"
            raise KeyError(f"`backend_key` must be one of {known}, got {backend_key!r}")
        return self.native_views[backend_key]
