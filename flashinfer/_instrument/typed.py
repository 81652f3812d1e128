"""Types of decorated functions: their own signatures, and ``fi_trace``.

These classes exist for type checkers alone: at run time a decorated function stays a function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

Parameters = ParamSpec("Parameters")
Remaining = ParamSpec("Remaining")
Instance = TypeVar("Instance", contravariant=True)
Returned = TypeVar("Returned", covariant=True)


class Traced(Protocol):
    """The attributes of a decorated function."""

    __name__: str
    __qualname__: str
    __module__: str
    __doc__: str | None

    def fi_trace(self, save_dir: str | Path | None = None, **kwargs: Any) -> dict[str, Any]:
        """The definition of a call with these arguments; see `flashinfer.fi_trace`."""


class BoundMethod(Traced, Protocol[Parameters, Returned]):
    """A decorated method of an object: the signature without ``self``."""

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned: ...


class ApiFunction(Traced, Protocol[Parameters, Returned]):
    """A decorated function or method: the signature that it was written with."""

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned: ...

    @overload
    def __get__(
        self, instance: None, owner: type[Any] | None
    ) -> ApiFunction[Parameters, Returned]: ...
    @overload
    def __get__(
        self: ApiFunction[Concatenate[Instance, Remaining], Returned],
        instance: Instance,
        owner: type[Any] | None = None,
    ) -> BoundMethod[Remaining, Returned]: ...


class CheckedFunction(ApiFunction[Parameters, Returned], Protocol):
    """A function below ``@backend_requirement``, which can say where it runs."""

    def is_backend_supported(self, backend: str, cc: int | tuple[int, int] | None = None) -> bool:
        """Whether it has a backend, on devices of a compute capability if one is given."""

    def is_compute_capability_supported(self, cc: int | tuple[int, int]) -> bool:
        """Whether any backend runs on devices of this compute capability."""

    def has_backend(self, backend: str) -> bool:
        """Whether it has a backend of this name."""

    def has_backend_choices(self) -> bool:
        """Whether it takes the name of a backend."""
