"""Which backends an API has, which devices each runs on, and the checks made before a call.

``@supported_compute_capability`` marks a check function; ``@backend_requirement`` runs the checks
before the API::

    @supported_compute_capability([80, 90])
    def _check_scale(input, factor, out=None):
        if input.numel() == 0:
            raise ValueError("input must not be empty")
        return True

    @backend_requirement(backend_checks={}, common_check=_check_scale)
    def scale(input, factor, out=None): ...

Check functions see the arguments of the API with its defaults filled in; each takes the parameters
it names. They return True, or raise ValueError with the reason. All signatures are read when the
decorator runs, so that a call pays for a tuple, one device look-up and the checks themselves
(``benchmarks/bench_host_overhead.py`` measures it).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, overload

import torch

from .._common.arch import Capability, as_number, get_compute_capability, get_device_name
from .._compile.traced import make_traceable
from .._instrument.experimental import (
    experimental_auto_backends_allowed,
    warn_experimental_backend_once,
)
from .._instrument.typed import CheckedFunction, Parameters, Returned

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_AUTO = "auto"


class BackendSupportedError(ValueError):
    """The backend that was asked for does not exist, or does not run on this device or on these
    arguments."""


def supported_compute_capability(
    supported_ccs: Iterable[int],
) -> Callable[[AnyFunction], AnyFunction]:
    """Mark a check function with the compute capabilities on which its backend runs.

    Parameters
    ----------
    supported_ccs : iterable of int
        ``10 * major + minor``: ``[80, 86, 89, 90, 100, 103, 110, 120]``. There is no automatic
        future compatibility: a capability that is not listed is refused.

    Raises
    ------
    TypeError, ValueError
        If an entry is not such a number, or there is none.
    """
    if not isinstance(supported_ccs, Iterable):
        raise TypeError(f"`supported_ccs` must be an iterable of int, got {supported_ccs!r}")
    capabilities = frozenset(as_number(cc) for cc in supported_ccs)
    if not capabilities:
        raise ValueError("supported_ccs must name at least one compute capability")

    def mark(check: AnyFunction) -> AnyFunction:
        check._supported_ccs = capabilities  # type: ignore[attr-defined]
        check.is_compute_capability_supported = (  # type: ignore[attr-defined]
            lambda cc: as_number(cc) in capabilities
        )
        return check

    return mark


class SuitableBackends(Sequence[str]):
    """The backends found for the running ``backend="auto"`` call of this thread, best first.

    The one object sits on the API function and is shared by all threads; what it shows is per
    thread, and per level of recursion. After the call it keeps showing what the thread's last call
    had.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def _current(self) -> Sequence[str]:
        running = getattr(self._of_thread, "running", None)
        return running[-1] if running else getattr(self._of_thread, "last", ())

    def enter(self, backends: Sequence[str]) -> None:
        """Show ``backends`` to this thread until :meth:`leave`."""
        try:
            self._of_thread.running.append(backends)
        except AttributeError:
            self._of_thread.running = [backends]

    def leave(self) -> None:
        """End what the latest :meth:`enter` began."""
        self._of_thread.last = self._of_thread.running.pop()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._current()[index]

    def __len__(self) -> int:
        return len(self._current())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple, SuitableBackends)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def _adapt(check: Callable[..., Any], names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """A function of the values of ``names`` that calls ``check`` with the parameters it takes."""
    parameters = inspect.signature(check).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError(f"check function {check.__qualname__} must name its parameters, not *args")
    for p in parameters:
        if p.name not in names and p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            raise TypeError(
                f"check function {check.__qualname__} takes {p.name!r}, which is not a parameter "
                f"of the API: {', '.join(names)}"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda values: check(**dict(zip(names, values, strict=True)))
    taken = [(p.name, names.index(p.name)) for p in parameters if p.name in names]
    if [name for name, _ in taken] == list(names) and all(
        p.kind is p.POSITIONAL_OR_KEYWORD for p in list(parameters)[: len(names)]
    ):
        return lambda values: check(*values)
    return lambda values: check(**{name: values[i] for name, i in taken})


# What most arguments are: to ask whether it is a tensor costs four times as much.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def _cuda_device(values: Sequence[Any]) -> torch.device | None:
    """Device of the first CUDA tensor, looking into tuples and lists (a KV cache may be a pair)."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return value.device
        elif isinstance(value, (tuple, list)):
            device = _cuda_device(value)
            if device is not None:
                return device
    return None


class _Check:
    """One check function: whom it serves, the capabilities it lists, and the call."""

    def __init__(self, subject: str, check: Callable[..., Any], names: Sequence[str]) -> None:
        self.subject = subject
        self.capabilities: frozenset[int] | None = getattr(check, "_supported_ccs", None)
        self.is_experimental: bool = getattr(check, "is_experimental_backend", False)
        self.accepts = _adapt(check, names)

    def supports(self, cc: int) -> bool:
        return self.capabilities is None or cc in self.capabilities

    def require_capability(self, device: torch.device | None) -> None:
        # Without a CUDA tensor there is no capability to ask for; the check function decides what
        # to say to that.
        if device is None or self.capabilities is None:
            return
        major, minor = get_compute_capability(device)
        if 10 * major + minor in self.capabilities:
            return
        listed = ", ".join(map(str, sorted(self.capabilities)))
        raise BackendSupportedError(
            f"{self.subject} does not support compute capability {10 * major + minor} of "
            f"{device} ({get_device_name(device)}); it supports {listed}"
        )

    def __call__(self, values: Sequence[Any], device: torch.device | None) -> None:
        self.require_capability(device)
        if not self.accepts(values):
            raise BackendSupportedError(
                f"Problem size is not supported: {self.subject} does not take these arguments"
            )


class _Requirement:
    """Everything ``@backend_requirement`` knows about one API."""

    def __init__(
        self,
        func: Callable[..., Any],
        backend_checks: dict[str, Callable[..., Any]],
        common_check: Callable[..., Any] | None,
        heuristic_func: Callable[..., Any] | None,
    ) -> None:
        self.name = func.__qualname__
        self.short_name = func.__name__
        names = self.names = tuple(inspect.signature(func).parameters)
        for parameter in inspect.signature(func).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"{self.name} takes {parameter}, whose values have no names")
        if "skip_check" in names:
            raise TypeError(f"{self.name} has a parameter skip_check, which this decorator adds")
        if backend_checks and "backend" not in names:
            raise TypeError(f"{self.name} has backend_checks but no parameter named backend")
        if heuristic_func is not None and not backend_checks:
            raise TypeError(f"{self.name} has a heuristic_func but no backend_checks")
        self.backend_index = names.index("backend") if backend_checks else -1
        self.common = _Check(self.name, common_check, names) if common_check is not None else None
        self.backends = {
            backend: _Check(f"{self.name}: backend {backend!r}", check, names)
            for backend, check in backend_checks.items()
        }
        self.rank = None
        if heuristic_func is not None:
            first = next(iter(inspect.signature(heuristic_func).parameters))
            self.rank = _adapt(heuristic_func, (first, *names))

    def check(self, values: Sequence[Any]) -> None:
        """Raise unless the named backend takes these values on their device."""
        device = _cuda_device(values)
        if self.common is not None:
            self.common(values, device)
        if self.backends:
            named = self.backend(values[self.backend_index])
            named(values, device)
            if named.is_experimental:
                warn_experimental_backend_once(self.name, values[self.backend_index])

    def backend(self, backend: Any) -> _Check:
        try:
            return self.backends[backend]
        except (KeyError, TypeError):
            allowed = ", ".join(map(repr, [*self.backends, *([_AUTO] if self.rank else [])]))
            raise BackendSupportedError(
                f"{self.name} does not support backend {backend!r}: "
                f"`backend` must be one of {allowed}"
            ) from None

    def suitable(self, values: Sequence[Any], skip_check: bool) -> Sequence[str]:
        """The backends that take these values, best first; with ``skip_check`` only the
        capabilities are looked at."""
        assert self.rank is not None
        device = _cuda_device(values)
        if self.common is not None and not skip_check:
            self.common(values, device)
        reasons, found = [], []
        for backend, check in self.backends.items():
            if check.is_experimental and not experimental_auto_backends_allowed():
                reasons.append(f"{check.subject} is experimental: it must be named")
                continue
            try:
                if skip_check:
                    check.require_capability(device)
                else:
                    check(values, device)
                found.append(backend)
            except ValueError as error:
                reasons.append(str(error))
        if not found:
            raise BackendSupportedError(
                f"No suitable auto backends found for {self.short_name}:\n  " + "\n  ".join(reasons)
            )
        ranked = list(self.rank((found, *values)))
        usable = [backend for backend in ranked if backend in found]
        if not usable:
            raise BackendSupportedError(
                f"No suitable auto backends found for {self.short_name}: its heuristic chose "
                f"{ranked} among {found}"
            )
        return usable

    def is_supported(self, backend: str, cc: Capability | None = None) -> bool:
        if not self.backends:
            raise ValueError(
                f"Invalid is_backend_supported call: no backend choices for {self.short_name}"
            )
        if backend not in self.backends:
            return False
        if cc is None:
            return True
        number = as_number(cc)
        return self.backends[backend].supports(number) and (
            self.common is None or self.common.supports(number)
        )

    def is_capability_supported(self, cc: Capability) -> bool:
        number = as_number(cc)
        if self.common is not None and not self.common.supports(number):
            return False
        return not self.backends or any(c.supports(number) for c in self.backends.values())


class _Requires(Protocol):
    def __call__(
        self, func: Callable[Parameters, Returned], /
    ) -> CheckedFunction[Parameters, Returned]: ...


def backend_requirement(
    backend_checks: dict[str, Callable[..., Any]],
    common_check: Callable[..., Any] | None = None,
    heuristic_func: Callable[..., Any] | None = None,
) -> _Requires:
    """Check backend, device and arguments before each call of an API.

    Parameters
    ----------
    backend_checks : dict of str to callable
        Check function of each backend; ``{}`` for an API with one implementation and no ``backend``
        parameter. Otherwise the API has a parameter ``backend`` that names one of them.
    common_check : callable, optional
        Check that every backend shares; runs first.
    heuristic_func : callable, optional
        ``heuristic_func(suitable_backends, <the API's parameters>)`` returns those backends best
        first; others that it names are left out. With it the API takes ``backend="auto"`` and reads
        the result in its body from ``<api>.suitable_auto_backends``.

    Returns
    -------
    callable
        A decorator. The decorated API takes one more keyword, ``skip_check=True``, which leaves the
        checks out (with ``backend="auto"`` the choice then rests on compute capabilities alone),
        and has the methods ``is_backend_supported(backend, cc=None)``,
        ``is_compute_capability_supported(cc)``, ``has_backend(backend)`` and
        ``has_backend_choices()``.

    Raises
    ------
    TypeError
        At decoration, if the functions do not fit together.
    BackendSupportedError
        At a call, a ``ValueError`` that names the backend, the capability of the device and what is
        supported. The capability is that of the first CUDA tensor among the arguments; without one
        only the check functions decide.
    """

    def decorate(func: Callable[Parameters, Returned], /) -> CheckedFunction[Parameters, Returned]:
        requirement = _Requirement(func, backend_checks, common_check, heuristic_func)
        auto = SuitableBackends() if heuristic_func is not None else None
        api: Any = functools.wraps(func)(_checked(func, requirement, auto))
        api.is_backend_supported = requirement.is_supported
        api.is_compute_capability_supported = requirement.is_capability_supported
        api.has_backend = requirement.backends.__contains__
        api.has_backend_choices = lambda: bool(requirement.backends)
        if auto is not None:
            api.suitable_auto_backends = auto
        if getattr(func, "__flashinfer_trace__", None) is not None:
            make_traceable(api, func, api.__flashinfer_trace__)
        return api

    return decorate


_SOURCE = """
def make(_func, _check, _suitable, _auto, _defaults):
    def api{signature}:
        {choose}
        if not skip_check:
            _check(({values}))
        return _func({arguments})
    return api
"""

_CHOOSE = """
        if backend == "auto":
            _auto.enter(_suitable(({values}), skip_check))
            try:
                return _func({arguments})
            finally:
                _auto.leave()
"""


def _checked(
    func: Callable[..., Any], requirement: _Requirement, auto: SuitableBackends | None
) -> Callable[..., Any]:
    """``func`` with the checks before it, and the keyword ``skip_check``.

    It is written out with the parameters of ``func``, as ``dataclasses`` does it: the interpreter
    then binds arguments and defaults, which in Python costs more than all the rest of the call.
    """
    parameters = list(inspect.signature(func).parameters.values())
    parameters.append(
        inspect.Parameter("skip_check", inspect.Parameter.KEYWORD_ONLY, default=False)
    )
    defaults = [p.default for p in parameters]
    signature = inspect.Signature(
        [
            p.replace(
                annotation=p.empty,
                default=p.empty if p.default is p.empty else _Verbatim(f"_defaults[{i}]"),
            )
            for i, p in enumerate(parameters)
        ]
    )
    arguments = ", ".join(
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters[:-1]
    )
    values = "".join(f"{name}, " for name in requirement.names)
    fields = {"values": values, "arguments": arguments}
    choose = _CHOOSE.format(**fields).strip() if auto is not None else ""
    source = _SOURCE.format(signature=signature, choose=choose, **fields)
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<checks of {requirement.name}>", "exec"), namespace)
    return namespace["make"](func, requirement.check, requirement.suitable, auto, defaults)


class _Verbatim(str):
    """Text that stands in a signature as it is."""

    def __repr__(self) -> str:
        return str(self)


def only_elsewhere(supported_ccs: Iterable[int]) -> Callable[[AnyFunction], AnyFunction]:
    """Turn a function into its refusal: its kernels exist for other GPUs, and not here.

    Engines import such names on every GPU and call them on some.

    Parameters
    ----------
    supported_ccs : iterable of int
        Compute capabilities on which FlashInfer has the function, ``10 * major + minor``.

    Returns
    -------
    callable
        A decorator. Calls raise `BackendSupportedError`, whatever the arguments are;
        ``is_compute_capability_supported`` and ``is_backend_supported`` answer False;
        ``refuses_every_call`` is True.
    """
    architectures = ", ".join(f"SM{as_number(cc)}" for cc in supported_ccs)

    def decorate(func: AnyFunction) -> AnyFunction:
        name = f"{func.__module__}.{func.__qualname__}".removesuffix(".__init__")

        @functools.wraps(func)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise BackendSupportedError(
                f"{name} has no kernels in this package (in FlashInfer it runs on "
                f"{architectures}); {_this_device()}"
            )

        api: Any = refuse
        api.refuses_every_call = True
        api.is_compute_capability_supported = lambda cc: False
        api.is_backend_supported = lambda backend, cc=None: False
        return api

    return decorate


def _this_device() -> str:
    if not torch.cuda.is_available():
        return "no GPU is visible"
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = get_compute_capability(device)
    return f"this GPU is {get_device_name(device)}, SM{10 * major + minor}"
