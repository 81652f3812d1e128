"""Error bounds derived from number formats, and a comparison that reports what is wrong.

The bound on one element y of a result that is accumulated in a wide format and then rounded to a
narrow one, against a reference that is not rounded:

    |actual - y| <= rtol * |y| + atol
    rtol = roundings * u  +  a
    atol = a * magnitude  +  roundings * half the smallest subnormal
    a    = (2 sqrt(n) + operations) * u_acc

u is the unit roundoff of the narrow format, u_acc that of the accumulator, n the number of terms
added. Roundings of a sum behave like a random walk whose steps have a standard deviation below
u_acc / sqrt(3), so 2 sqrt(n) u_acc is 3.4 standard deviations of adding in sequence, and far more
of adding in a tree as GPU kernels do (N. J. Higham, T. Mary, "A new approach to probabilistic
rounding error analysis", SIAM J. Sci. Comput. 41, 2019). ``magnitude`` is the size of the terms
that cancel into y: by default the largest |y| of its row. A reference of the result's own type
has been rounded too, and adds one u.

A bound on single elements lets a systematic error pass as long as it is small. So the mean signed
error is bounded too: independent roundings average out like 1/sqrt(number of elements)
(Hoeffding's inequality), while truncation instead of rounding, or a factor that is slightly off,
does not."""

from __future__ import annotations

import dataclasses
import math

import torch

__all__ = ["Comparison", "ErrorBound", "compare", "error_bound", "unit_roundoff"]

# Independent errors e_i, |e_i| <= b_i, have |sum| > 6 sqrt(sum b_i^2) with a probability below 2
# exp(-18) = 3e-8.
_HOEFFDING = 6.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to ``dtype``: 2**-8 for bfloat16, 2**-24 for float32.

    Raises
    ------
    TypeError
        If ``dtype`` is not a floating type.
    """
    return float(torch.finfo(dtype).eps) / 2


@dataclasses.dataclass(frozen=True)
class ErrorBound:
    """Largest difference from the expected value that rounding explains.

    Attributes
    ----------
    rounding : float
        Relative part that is independent from element to element (rounding to the output format).
    accumulation : float
        Relative part that may be shared by the elements of a row (say through one sum of squares).
    smallest : float
        Absolute part: what underflow in the output format explains.
    magnitude : float or None
        Size of the terms that cancel into an element; None takes the largest ``|expected|`` of
        the element's row.
    """

    rounding: float
    accumulation: float
    smallest: float = 0.0
    magnitude: float | None = None

    def systematic(self, expected: torch.Tensor) -> torch.Tensor:
        """The shared part of the bound, per element of ``expected`` (float64, finite)."""
        size = expected.abs()
        if self.magnitude is not None:
            scale = torch.full_like(size, self.magnitude)
        elif size.numel() and size.dim():
            scale = size.amax(dim=-1, keepdim=True).expand_as(size)
        else:
            scale = size
        return self.accumulation * (size + scale)

    def limit(self, expected: torch.Tensor) -> torch.Tensor:
        """The whole bound, per element of ``expected`` (float64, finite)."""
        return self.rounding * expected.abs() + self.smallest + self.systematic(expected)


def error_bound(
    dtype: torch.dtype,
    accumulation_length: int = 1,
    *,
    accumulation_dtype: torch.dtype = torch.float32,
    roundings: int = 1,
    operations: int = 16,
    magnitude: float | None = None,
) -> ErrorBound:
    """The bound for results of type ``dtype``, as derived at the top of this module.

    Parameters
    ----------
    dtype : torch.dtype
        Type of the output. Integers and bools get the bound 0.
    accumulation_length : int
        Number of terms that are added up for one element (the hidden size of a norm).
    accumulation_dtype : torch.dtype
        Type in which the kernel adds.
    roundings : int
        Times a value is rounded to ``dtype`` (or to a type as coarse) on its way to the output.
    operations : int
        Other elementary operations in the accumulator type on the way, each good for one
        rounding; approximate ``exp``, ``rsqrt`` and division count for two or three.
    magnitude : float, optional
        Size of the terms that cancel into an element, where that is larger than the result.

    Raises
    ------
    ValueError
        If ``accumulation_length`` or ``roundings`` is below 1, or ``operations`` below 0.
    """
    for name, value, least in (
        ("accumulation_length", accumulation_length, 1),
        ("roundings", roundings, 1),
        ("operations", operations, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not dtype.is_floating_point:
        return ErrorBound(0.0, 0.0, 0.0, magnitude)
    accumulation = (2 * math.sqrt(accumulation_length) + operations) * unit_roundoff(
        accumulation_dtype
    )
    info = torch.finfo(dtype)
    return ErrorBound(
        rounding=roundings * unit_roundoff(dtype),
        accumulation=accumulation,
        smallest=roundings * float(info.smallest_normal) * float(info.eps) / 2,
        magnitude=magnitude,
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`. ``bool(comparison)`` is True when nothing is wrong.

    Attributes
    ----------
    failures : tuple of str
        One sentence per broken demand.
    worst_index : tuple of int or None
        Element with the largest error relative to its bound.
    worst_actual, worst_expected, worst_ratio : float
        Both values there and error / bound (above 1 is a failure).
    wrong_elements, elements : int
        Elements beyond their bound or with the wrong NaN/infinity, and all elements.
    cosine, bias, bias_limit : float
        Cosine similarity, mean signed error (the larger of the plain mean and the mean along the
        sign of the expected value), and what the latter may be.
    """

    failures: tuple[str, ...] = ()
    worst_index: tuple[int, ...] | None = None
    worst_actual: float = math.nan
    worst_expected: float = math.nan
    worst_ratio: float = 0.0
    wrong_elements: int = 0
    elements: int = 0
    cosine: float = 1.0
    bias: float = 0.0
    bias_limit: float = math.inf

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = list(self.failures) or ["equal within rounding"]
        if self.worst_index is not None:
            lines.append(
                f"worst element {list(self.worst_index)}: actual {self.worst_actual:.9g}, "
                f"expected {self.worst_expected:.9g} ({self.worst_ratio:.3g} times the bound)"
            )
        lines.append(
            f"{self.wrong_elements} of {self.elements} elements wrong, cosine {self.cosine:.9f}, "
            f"bias {self.bias:.3g} (limit {self.bias_limit:.3g})"
        )
        return "\n  ".join(lines)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """To float64, exactly, on any device (one-byte floats only convert through float32)."""
    return (
        tensor.detach().float().double() if tensor.element_size() == 1 else tensor.detach().double()
    )


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for n in reversed(shape):
        flat, position = divmod(flat, n)
        index.append(position)
    return tuple(reversed(index))


def _mask_failures(
    a: torch.Tensor, e: torch.Tensor, limit: torch.Tensor, largest: float
) -> tuple[list[str], torch.Tensor]:
    """Sentences about misplaced NaN and infinities, and where they are."""
    # An expected value that is finite but at the end of the narrow format's range may be rounded
    # to infinity.
    overflows = e.isfinite() & (e.abs() + limit >= largest)
    wrong = torch.zeros(e.shape, dtype=torch.bool, device=e.device)
    failures = []
    masks = {
        "NaN": (a.isnan(), e.isnan()),
        "+inf": ((a == math.inf) & ~(overflows & (e > 0)), e == math.inf),
        "-inf": ((a == -math.inf) & ~(overflows & (e < 0)), e == -math.inf),
    }
    for name, (got, wanted) in masks.items():
        extra, missing = int((got & ~wanted).sum()), int((wanted & ~got).sum())
        if extra or missing:
            failures.append(f"{name}: {extra} where none is expected, {missing} missing")
            wrong |= got ^ wanted
    return failures, wrong


def _cosine(a: torch.Tensor, e: torch.Tensor) -> float:
    # Scaled by the maxima so that squares neither overflow nor vanish.
    top_a, top_e = float(a.abs().max()), float(e.abs().max())
    if top_a == 0.0 or top_e == 0.0:
        return 1.0 if top_a == top_e else 0.0
    a, e = a / top_a, e / top_e
    return float((a * e).sum() / (a.norm() * e.norm()))


def _least_cosine(e: torch.Tensor, limit: torch.Tensor) -> float:
    """Cosine that is left when every error is at its limit, perpendicular to ``e``, minus slack."""
    size = float(e.norm())
    relative = float(limit.norm()) / size if size else math.inf
    return 1 - relative * relative - 1e-12


def _bias(
    a: torch.Tensor, e: torch.Tensor, limit: torch.Tensor, systematic: torch.Tensor
) -> tuple[float, float]:
    """Mean signed error, plain or along the sign of ``e`` (whichever is larger), and its limit."""
    if not e.numel():
        return 0.0, math.inf
    error = a - e
    plain, along = float(error.mean()), float((error * e.sign()).mean())
    bias = plain if abs(plain) >= abs(along) else along
    random_part = _HOEFFDING * float(limit.square().sum().sqrt()) / error.numel()
    return bias, random_part + float(systematic.mean())


def _rounded(e: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``e`` (float64) as ``dtype`` would hold it; infinite beyond its range."""
    return _wide(e.to(dtype))


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    bound: ErrorBound | None = None,
    check_bias: bool = True,
) -> Comparison:
    """Compare a result with its reference: masks first, then every element, then cosine and bias.

    Parameters
    ----------
    actual : torch.Tensor
        The kernel's result.
    expected : torch.Tensor
        Same shape and device. A wider type is taken as not rounded; the same type as rounded once.
    bound : ErrorBound, optional
        Default ``error_bound(actual.dtype)``. Integers and bools must be equal.
    check_bias : bool
        Whether the mean signed error counts. Turn it off where errors are correlated for a known
        reason.

    Returns
    -------
    Comparison
        Falsy if anything is wrong; ``str()`` of it says what, with the worst element, its index
        and both values.
    """
    if actual.shape != expected.shape:
        return Comparison((f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}",))
    if actual.dtype.is_floating_point != expected.dtype.is_floating_point:
        return Comparison((f"dtype {actual.dtype}, expected {expected.dtype}",))
    if actual.numel() == 0:
        return Comparison()
    if not actual.dtype.is_floating_point:
        return _compare_exactly(actual, expected)
    bound = error_bound(actual.dtype) if bound is None else bound
    if expected.element_size() <= actual.element_size():
        bound = dataclasses.replace(bound, rounding=bound.rounding + unit_roundoff(expected.dtype))
    a, e = _wide(actual), _wide(expected)
    known = e.isfinite()
    limit = bound.limit(e.where(known, 0.0))
    failures, misplaced = _mask_failures(a, e, limit, float(torch.finfo(actual.dtype).max))

    # Where either is not finite the masks have spoken; a zero there keeps what follows finite.
    finite = a.isfinite() & known
    a, e = a.where(finite, 0.0), e.where(finite, 0.0)
    error = (a - e).abs()
    beyond = (error > limit) & finite
    if n := int(beyond.sum()):
        failures.append(f"{n} elements differ by more than rounding explains")

    cosine, least = _cosine(a, e), _least_cosine(e, limit)
    if cosine < least:
        failures.append(f"cosine similarity {cosine:.9f}, at least {least:.9f} expected")

    # Against the rounded reference: many equal elements share their rounding error, and a correct
    # kernel shares it too.
    near = _rounded(e, actual.dtype)
    counted = finite & near.isfinite()
    bias, bias_limit = _bias(*(t[counted] for t in (a, near, limit, bound.systematic(e))))
    if check_bias and abs(bias) > bias_limit:
        failures.append(
            f"mean signed error {bias:.3g}, at most {bias_limit:.3g} explained by rounding"
        )

    ratio = torch.where(error == 0, 0.0, error / limit).masked_fill(misplaced, math.inf)
    found = Comparison(
        tuple(failures),
        wrong_elements=int((beyond | misplaced).sum()),
        elements=a.numel(),
        cosine=cosine,
        bias=bias,
        bias_limit=bias_limit,
    )
    return _with_worst(found, actual, expected, ratio)


def _compare_exactly(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    different = actual != expected
    n = int(different.sum())
    failures = (f"{n} elements differ",) if n else ()
    found = Comparison(failures, wrong_elements=n, elements=actual.numel())
    return _with_worst(found, actual, expected, torch.where(different, math.inf, 0.0))


def _with_worst(
    found: Comparison, actual: torch.Tensor, expected: torch.Tensor, ratio: torch.Tensor
) -> Comparison:
    """Add the element with the largest ``ratio``, if any is above zero."""
    flat = int(ratio.argmax())
    index = _unravel(flat, ratio.shape)
    if float(ratio[index]) == 0:
        return found
    return dataclasses.replace(
        found,
        worst_index=index,
        worst_actual=float(actual[index]),
        worst_expected=float(expected[index]),
        worst_ratio=float(ratio[index]),
    )
