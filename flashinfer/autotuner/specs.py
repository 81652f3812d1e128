"""Describes the inputs of a tuned operation: the sizes that vary, and their buckets."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = tuple[int, ...]
Initializer = Callable[[Shape, torch.dtype, torch.device], torch.Tensor]


# ---- buckets -----------------------------------------------------------------------------------


def round_to_nearest_bucket(x: int, buckets: Sequence[int], round_map: bool = False) -> int:
    """The bucket of a size.

    Parameters
    ----------
    x : int
        A size.
    buckets : sequence of int
        Ascending, not empty.
    round_map : bool
        Whether to take the least bucket that is not below `x`, in place of the largest that is
        not above it. A size outside the buckets gets the first or the last.
    """
    index = bisect.bisect_left(buckets, x) if round_map else bisect.bisect_right(buckets, x) - 1
    return buckets[min(max(index, 0), len(buckets) - 1)]


def make_bucket_mapper(buckets: Sequence[int], round_map: bool = False) -> Callable[[int], int]:
    """`round_to_nearest_bucket` as a function of the size; `buckets` may be in any order."""
    ascending = tuple(sorted(set(buckets)))
    if not ascending or ascending[0] < 0:
        raise ValueError(f"`buckets` must hold sizes of 0 and more, got {tuple(buckets)}")
    return lambda x: round_to_nearest_bucket(x, ascending, round_map)


# ---- inputs of a measurement -------------------------------------------------------------------


def autotuner_initializer_empty(
    shapes: Shape, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor whose values do not matter."""
    return torch.empty(shapes, dtype=dtype, device=device)


def autotuner_initializer_zeros(
    shapes: Shape, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of zeros."""
    return torch.zeros(shapes, dtype=dtype, device=device)


def autotuner_initializer_ones(
    shapes: Shape, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of ones."""
    return torch.ones(shapes, dtype=dtype, device=device)


def autotuner_initializer_rand(
    shapes: Shape, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uniform numbers from 0 to 1."""
    return torch.rand(shapes, device=device).to(dtype)


def autotuner_initializer_rand_scaled(
    shapes: Shape, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uniform numbers from -5 to 5: of a size that 8-bit formats keep."""
    return (torch.rand(shapes, device=device) * 10 - 5).to(dtype)


def autotuner_initializer_randn(
    shapes: Shape, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(shapes, device=device).to(dtype)


# ---- what varies -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DynamicTensorSpec:
    """Dimensions of inputs that vary together, such as the number of tokens.

    Parameters
    ----------
    input_idx, dim_idx : tuple of int
        The inputs, and of each the dimension; the first gives the size.
    gen_tuning_buckets : tuple of int, or callable
        Sizes that are measured, or a function of the present size that returns them.
    map_to_tuning_buckets : callable
        A function from a size to the bucket whose result serves it.
    """

    input_idx: tuple[int, ...]
    dim_idx: tuple[int, ...]
    gen_tuning_buckets: tuple[int, ...] | Callable[[int], Iterable[int]]
    map_to_tuning_buckets: Callable[[int], int]

    def __post_init__(self) -> None:
        if len(self.input_idx) != len(self.dim_idx) or not self.input_idx:
            raise ValueError(
                "`dim_idx` must name one dimension for each input of `input_idx`, got "
                f"{self.dim_idx} for {self.input_idx}"
            )

    def buckets(self, size: int) -> tuple[int, ...]:
        """Sizes to measure when a call has `size`, ascending."""
        given = self.gen_tuning_buckets
        return tuple(sorted(set(given(size) if callable(given) else given)))


@dataclass(frozen=True)
class ConstraintSpec:
    """A dimension that follows from other sizes.

    Parameters
    ----------
    input_idx, dim_idx : int
        The input and its dimension.
    infer_shape : callable
        A function from the shapes of all inputs to the size.
    """

    input_idx: int
    dim_idx: int
    infer_shape: Callable[[tuple[Shape, ...]], int]


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How an operation is tuned.

    Parameters
    ----------
    dynamic_tensor_specs : tuple of DynamicTensorSpec
        Sizes that vary from call to call. All other sizes belong to the key of a result.
    constraint_specs : tuple of ConstraintSpec
        Sizes that follow from the varying ones; they are not part of the key.
    tensor_initializers : tuple of (int, callable)
        For an input, the function that makes its tensor at a size that the call does not have.
        An input without one gets normally distributed numbers, or zeros if its dtype is integer.
    use_cold_l2_cache, use_cuda_graph, use_cold_l2_graph_replay : bool
        Accepted for callers of FlashInfer. Measurements use a CUDA graph and a cold cache in any
        case, unless a `MeasurementPolicy` says otherwise.
    cuda_graph_profile_replays : int
        Replays in one timed sample.
    profiling_repeat : int, optional
        Samples of the last round; the tuner's number by default.
    value_aware_input_indices, profile_arena_input_indices : tuple of int
        Inputs whose values count (routing, lengths): a measurement at another size takes the
        call's values, cut or repeated to the size.
    inputs_pre_hook : callable, optional
        A function from the list of a measurement's inputs to the list that is used.
    """

    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[ConstraintSpec, ...] = ()
    tensor_initializers: tuple[tuple[int, Initializer], ...] = ()
    use_cold_l2_cache: bool = False
    use_cuda_graph: bool = False
    cuda_graph_profile_replays: int = 1
    profiling_repeat: int | None = None
    use_cold_l2_graph_replay: bool = False
    value_aware_input_indices: tuple[int, ...] = ()
    profile_arena_input_indices: tuple[int, ...] = ()
    inputs_pre_hook: Callable[[list[Any]], list[Any]] | None = None


# ---- one set of sizes --------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticDim:
    """A size that is part of a result's key."""

    val: int

    @property
    def opt(self) -> int:
        return self.val


@dataclass(frozen=True)
class DynamicDim:
    """A size that stands for those from `min` up to, not including, `max`; `opt` is measured."""

    min: int
    opt: int
    max: int


@dataclass
class OptimizationProfile:
    """Sizes of all inputs for one measurement.

    Attributes
    ----------
    shapes : list of list of StaticDim or DynamicDim
        For each input its dimensions.
    tensor_initializers : list
        For each input a function that makes it, or None.
    """

    shapes: list[list[DynamicDim | StaticDim]]
    tensor_initializers: list[Initializer | None] = field(default_factory=list)

    def get_opt_shapes(self) -> tuple[Shape, ...]:
        """The shapes that are measured."""
        return tuple(tuple(dim.opt for dim in dims) for dims in self.shapes)

    def get_hash_key(self) -> tuple[Shape, ...]:
        """The measured shapes, which distinguish profiles."""
        return self.get_opt_shapes()


@dataclass(frozen=True)
class ProfilingCacheKey:
    """The key that a result is stored under.

    Attributes
    ----------
    custom_op : str
        Name of the operation.
    runner_class_name : str
        Class of the implementation.
    runner_hash : int
        0; results outlive the process, and Python's hashes do not.
    nearest_profile : tuple of tuple of int
        Shapes with varying sizes at their buckets and those that follow from them at -1.
    extras : tuple
        Other values that the runner's choice depends on, such as dtypes.
    """

    custom_op: str
    runner_class_name: str
    runner_hash: int
    nearest_profile: tuple[Shape, ...]
    extras: tuple[Any, ...]

    def text(self) -> str:
        """The key in a file."""
        parts = (self.custom_op, self.runner_class_name, self.nearest_profile, self.extras)
        return " | ".join(map(str, parts))


def shape_of(value: Any) -> Shape:
    """The shape of an input; none for what is no tensor."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def varying_sizes(shapes: tuple[Shape, ...], config: TuningConfig) -> list[int]:
    """The sizes that a call has for the specs of `config`."""
    return [shapes[s.input_idx[0]][s.dim_idx[0]] for s in config.dynamic_tensor_specs]


def profile_at(
    shapes: tuple[Shape, ...], config: TuningConfig, sizes: Sequence[int]
) -> OptimizationProfile:
    """The profile of `shapes` with the varying dimensions at `sizes`."""
    changed = [list(shape) for shape in shapes]
    dims: list[list[DynamicDim | StaticDim]] = [[*map(StaticDim, shape)] for shape in shapes]
    for spec, size in zip(config.dynamic_tensor_specs, sizes, strict=True):
        for i, d in zip(spec.input_idx, spec.dim_idx, strict=True):
            changed[i][d] = size
            dims[i][d] = DynamicDim(size, size, size + 1)
    for constraint in config.constraint_specs:
        i, d = constraint.input_idx, constraint.dim_idx
        size = int(constraint.infer_shape(tuple(map(tuple, changed))))
        changed[i][d] = size
        dims[i][d] = DynamicDim(size, size, size + 1)
    by_input = dict(config.tensor_initializers)
    return OptimizationProfile(dims, [by_input.get(i) for i in range(len(shapes))])


def make_inputs(
    inputs: Sequence[Any], profile: OptimizationProfile, config: TuningConfig
) -> list[Any]:
    """Inputs of a measurement: the call's own where the shape agrees, others made."""
    valued = {*config.value_aware_input_indices, *config.profile_arena_input_indices}
    made = []
    for i, (value, shape) in enumerate(zip(inputs, profile.get_opt_shapes(), strict=True)):
        if not isinstance(value, torch.Tensor) or tuple(value.shape) == shape:
            made.append(value)
        elif i in valued:
            made.append(_resized(value, shape))
        else:
            initializer = profile.tensor_initializers[i] or _default_initializer
            made.append(initializer(shape, value.dtype, value.device))
    return made if config.inputs_pre_hook is None else list(config.inputs_pre_hook(made))


def _default_initializer(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return autotuner_initializer_randn(shape, dtype, device)
    return autotuner_initializer_zeros(shape, dtype, device)


def _resized(value: torch.Tensor, shape: Shape) -> torch.Tensor:
    """`value` cut, or repeated from its beginning, along the dimensions that differ."""
    for dim, size in enumerate(shape):
        if value.shape[dim] == 0:
            return autotuner_initializer_zeros(shape, value.dtype, value.device)
        index = torch.arange(size, device=value.device) % value.shape[dim]
        value = value.index_select(dim, index)
    return value
