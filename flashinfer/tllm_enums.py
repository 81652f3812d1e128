"""Enumerations of the public interface."""

from __future__ import annotations

import enum


class SfLayout(enum.IntEnum):
    """Order of the block scales of a quantised matrix: a scale for each row and block of a row.

    Block-scaled tensor cores of Blackwell read tiles; other code reads rows.
    """

    layout_128x4 = 0
    """Tiles of 128 rows by 4 blocks, 512 scales each; within a tile the order from slow to fast is
    row modulo 32, row divided by 32, block. Rows and blocks are padded to whole tiles by zeros."""

    layout_8x4 = 1
    """Tiles of 8 rows by 4 blocks, row-major within a tile; padded likewise."""

    layout_linear = 2
    """Row-major, without padding."""


class ActivationType(enum.IntEnum):
    """The step after the first product of a mixture of experts.

    A gated one takes two halves of the product's columns: values u come first, gates g last.
    """

    Gelu = 0
    """x Phi(x), with the normal distribution Phi."""
    Relu = 1
    """max(x, 0)."""
    Silu = 2
    """x sigmoid(x)."""
    Swiglu = 3
    """g sigmoid(g) u."""
    Geglu = 4
    """g Phi(g) u."""
    SwigluBias = 5
    """g sigmoid(alpha g) (u + beta), with g bounded from above and u on both sides."""
    Relu2 = 6
    """max(x, 0)^2."""
    SwigluStep = 7
    """silu(g) bounded from above, times u bounded on both sides."""
    GegluTanh = 8
    """As Geglu, with the tanh approximation of Phi."""
    Identity = 9
    """x."""
    Situ = 10
    """A gate with bounded tangents."""
    InvalidType = 11
    """No activation."""
    ClampedRelu2 = 12
    """max(x, 0)^2 with a bound on x."""

    @property
    def is_gated(self) -> bool:
        """Whether it takes two halves of the columns."""
        return self in _GATED_ACTIVATIONS


_GATED_ACTIVATIONS = frozenset(
    {
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.SwigluBias,
        ActivationType.SwigluStep,
        ActivationType.GegluTanh,
        ActivationType.Situ,
    }
)


def normalize_activation_type(activation_type: int | ActivationType) -> ActivationType:
    """The member with this value.

    Raises
    ------
    ValueError
        If there is none.
    """
    try:
        return ActivationType(activation_type)
    except ValueError:
        allowed = ", ".join(f"{member.value} ({member.name})" for member in ActivationType)
        raise ValueError(
            f"`activation_type` must be one of {allowed}, got {activation_type!r}"
        ) from None


def is_gated_activation(activation_type: int | ActivationType) -> bool:
    """Whether an activation takes two halves of the columns; errors as its normalisation."""
    return normalize_activation_type(activation_type).is_gated


class RoutingMethodType(enum.IntEnum):
    """How a router's logits become experts and weights."""

    Default = 0
    """Softmax, then the best k."""
    Renormalize = 1
    """The best k, then softmax over them."""
    DeepSeekV3 = 2
    """Sigmoid and bias, the best groups, the best k of them, weights that sum to 1."""
    Llama4 = 3
    """The best one, then sigmoid."""
    RenormalizeNaive = 4
    """Softmax, the best k, weights that sum to 1."""
    TopK = 5
    """The best k logits as they are."""
    SigmoidRenorm = 6
    """Sigmoid, the best k, weights that sum to 1."""
    MiniMax2 = 7
    """Sigmoid and bias, the best k, weights that sum to 1."""
    Sigmoid = 8
    """Sigmoid, then the best k."""
    TopKSigmoid = 9
    """The best k, then sigmoid."""
    Unspecified = 10
    """None of these."""


class RoutingInputMode(enum.IntEnum):
    """In which form a mixture of experts gets its routing."""

    FromLogits = 0
    """The router's logits."""
    PackedPrecomputed = 1
    """Expert and weight of a choice in one number."""
    UnpackedPrecomputed = 2
    """Experts and weights."""


class WeightLayout(enum.IntEnum):
    """Order of a weight's elements in memory."""

    MajorK = 0
    """Terms of a sum are neighbours."""
    MajorMn = 1
    """Columns of the result are neighbours."""
    BlockMajorK = 2
    """Blocks of terms, MajorK within a block."""


class Fp8QuantizationType(enum.IntEnum):
    """Which elements of 8-bit weights and activations share a scale."""

    NoneFp8 = 0
    """Nothing is quantised."""
    DeepSeekFp8 = 1
    """128 elements of a row; 128 by 128 elements of a weight."""
    MxFp8 = 2
    """32 elements of a row."""
    PerTensorFp8 = 3
    """All elements."""
    PerChannelFp8 = 4
    """A row of the activations, a column of the result."""


class TopKTieBreak(enum.IntEnum):
    """Which of the elements equal to the k-th largest are taken."""

    NONE = 0
    """No preference: the smallest indices."""
    SMALL = 1
    """The smallest indices."""
    LARGE = 2
    """The largest indices."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
