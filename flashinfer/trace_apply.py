"""Run solutions of FlashInfer-Bench in place of operations, by the definition of each call.

    import flashinfer, flashinfer.trace_apply as trace_apply

    trace_apply.enable_apply({"rmsnorm_h4096": my_rmsnorm})
    flashinfer.rmsnorm(x, w)       # my_rmsnorm(hidden_states=x, weight=w, eps=1e-6)
    trace_apply.stats()            # {"rmsnorm": {"hit": 1, "fallback": 0, "error": 0}}
    trace_apply.disable_apply()

A call of another definition runs its kernel, and so does one whose solution fails: what it returned
is looked at before anything is written. docs/trace.md has the rules.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch

from . import env
from ._common import checks
from ._common.numbers import plain_arguments
from ._instrument import routes
from ._instrument.decorator import traced_functions
from .jit.core import gen_jit_spec
from .trace.solution import Solution, SupportedBindings
from .trace.specs import Scalar, argument_of
from .trace.template import TraceTemplate, resolve_template, templates_of

__all__ = ["current_sm", "disable_apply", "enable_apply", "is_enabled", "stats", "stats_snapshot"]

_logger = logging.getLogger("flashinfer.trace_apply")
_inside: ContextVar[bool] = ContextVar("flashinfer_trace_apply_inside", default=False)


def enable_apply(solutions: Mapping[str, Any] | None = None, *, verify: bool = False) -> int:
    """Replace operations by solutions until `disable_apply`; another call replaces the solutions.

    Parameters
    ----------
    solutions : mapping of str to callable or Solution, optional
        A solution for each name of a definition. A callable takes the definition's inputs by name
        and returns its outputs, a tensor or a tuple. A `flashinfer.trace.Solution` is built here;
        with ``destination_passing_style`` it is called with inputs, then outputs, by position.
        None: the files ``*.json`` under the folder that ``FLASHINFER_TRACE_APPLY`` names; nothing
        happens if it is not set.
    verify : bool
        Compare the first result for each definition with the operation's reference, by the check of
        its template; a solution that fails is not used again. References are slow.

    Returns
    -------
    int
        How many functions may be replaced.

    Raises
    ------
    TypeError
        If something is neither a callable nor a solution.
    ValueError
        If a solution is under another name than its definition's, two are for one definition, or
        its binding is that of PyTorch, which is not built here.
    """
    checks.flag("verify", verify)
    if solutions is None:
        folder = env.FLASHINFER_TRACE_APPLY.get()
        if folder is None:
            return 0
        solutions = _read(folder)
    candidates = {name: _Candidate(name, solution) for name, solution in solutions.items()}
    disable_apply()
    _applied.start(candidates, verify)
    for name in candidates:
        if not any(_names(trace, name) for _, trace in traced_functions):
            _logger.warning("No operation that is imported has a definition %r", name)
    return _applied.count()


def disable_apply() -> None:
    """Let operations run their kernels again; nothing happens if they do."""
    _applied.stop()


def is_enabled() -> bool:
    """Whether solutions replace operations."""
    return bool(_applied.candidates)


def stats() -> dict[str, dict[str, int]]:
    """Calls by function since `enable_apply`.

    Returns
    -------
    dict
        ``"hit"``: a solution ran; ``"fallback"``: there is none for the call's definition, or it
        has failed its check; ``"error"``: it failed, and the kernel ran.
    """
    return {name: dict(counts) for name, counts in _applied.counts.items()}


stats_snapshot = stats


def current_sm(device: Any = None) -> str | None:
    """``"sm_90"`` and the like for a device, by default the current one; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class _Candidate:
    """A solution, and whether it may still be used."""

    def __init__(self, name: str, solution: Any) -> None:
        self.passes_outputs = False
        self.is_trusted = False
        self.has_failed = False
        if isinstance(solution, Solution):
            if solution.definition != name:
                raise ValueError(
                    f"`solutions` must have a solution of {solution.definition!r} under that name, "
                    f"got {name!r}"
                )
            self.passes_outputs = solution.spec.destination_passing_style
            self.function = _load(solution)
        elif callable(solution):
            self.function = solution
        else:
            raise TypeError(
                f"`solutions[{name!r}]` must be a callable or a Solution, got "
                f"{type(solution).__name__}"
            )

    def run(self, template: TraceTemplate, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Its results, of the shapes and dtypes that the template says."""
        inputs = {
            key: argument_of(key, spec, arguments)
            for key, spec in template.inputs.items()
            if argument_of(key, spec, arguments) is not None
        }
        expected = _expected(template, arguments)
        if not self.passes_outputs:
            returned = self.function(**inputs)
            if isinstance(returned, Mapping):
                returned = tuple(returned[key] for key in template.outputs)
            results = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        else:
            device = next(x.device for x in inputs.values() if isinstance(x, torch.Tensor))
            results = tuple(
                torch.empty(shape, dtype=dtype, device=device) for shape, dtype in expected
            )
            self.function(*inputs.values(), *results)
        _check_results(template, results, expected)
        return results


def _expected(
    template: TraceTemplate, arguments: Mapping[str, Any]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    sizes, dtypes = template.axis_values(arguments), template.dtypes(arguments)
    found = []
    for key, spec in template.outputs.items():
        if isinstance(spec, Scalar):
            raise ValueError(f"output {key!r} is a number, which no solution gives")
        given = argument_of(key, spec, arguments)
        shape = tuple(sizes[axis] for axis in spec.dim_names) if given is None else given.shape
        found.append((tuple(shape), getattr(torch, dtypes[key])))
    return found


def _check_results(template: TraceTemplate, results: tuple[Any, ...], expected: Any) -> None:
    if len(results) != len(expected):
        raise ValueError(f"it returned {len(results)} outputs of {len(expected)}")
    for key, result, (shape, dtype) in zip(template.outputs, results, expected, strict=True):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"output {key!r} is no torch.Tensor but {type(result).__name__}")
        if tuple(result.shape) != shape or result.dtype != dtype:
            raise ValueError(
                f"output {key!r} must be {dtype} of shape {list(shape)}, got {result.dtype} of "
                f"shape {list(result.shape)}"
            )


class _Applied:
    """Takes calls whose definition has a solution."""

    def __init__(self) -> None:
        self.candidates: dict[str, _Candidate] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.verifies = False

    def start(self, candidates: dict[str, _Candidate], verify: bool) -> None:
        self.candidates, self.verifies, self.counts = candidates, verify, {}
        if candidates:
            routes.add_user(self, first=True)

    def stop(self) -> None:
        if self.candidates:
            self.candidates = {}
            routes.remove_user(self)

    def count(self) -> int:
        return sum(self.wants(trace) for _, trace in traced_functions)

    def wants(self, trace: Any) -> bool:
        return any(_names(trace, name) for name in self.candidates)

    def is_awake(self) -> bool:
        return bool(self.candidates) and not _inside.get()  # a solution may call operations

    def take(self, route: routes.Route, arguments: dict[str, Any]) -> Any:
        counts = self.counts.setdefault(
            route.function.__qualname__, {"hit": 0, "fallback": 0, "error": 0}
        )
        found = self._find(route, plain_arguments(arguments))
        if found is None:
            counts["fallback"] += 1
            return routes.NOT_TAKEN
        template, gathered, name, candidate = found
        token = _inside.set(True)
        try:
            results = candidate.run(template, gathered)
            self._verify(candidate, template, gathered, results)
        except Exception as error:
            candidate.has_failed = True
            counts["error"] += 1
            _logger.warning(
                "The solution of %s failed and is not used any more: %s: %s",
                name,
                type(error).__name__,
                error,
            )
            return routes.NOT_TAKEN
        finally:
            _inside.reset(token)
        counts["hit"] += 1
        return routes.deliver(route.function, template, gathered, results, copies=False)

    def _find(self, route: routes.Route, arguments: dict[str, Any]) -> Any:
        """Template, arguments, name and solution of a call; None where there is no solution."""
        try:
            template = resolve_template(route.trace, arguments)
            if template is None:
                return None
            gathered = template.gathered(arguments)
            name = template.call_name(arguments)
            candidate = self.candidates.get(name)
            if candidate is None or candidate.has_failed:
                return None
            template.validate(gathered)
        except (TypeError, ValueError):  # the kernel's checks say what is wrong
            return None
        return template, gathered, name, candidate

    def _verify(
        self,
        candidate: _Candidate,
        template: TraceTemplate,
        arguments: Mapping[str, Any],
        results: tuple[Any, ...],
    ) -> None:
        if not self.verifies or candidate.is_trusted or template.reference is None:
            return
        dtypes = [getattr(torch, dtype) for dtype in _dtypes_of(template, arguments)]
        computed = template.compute(arguments)
        expected = tuple(x.to(dtype) for x, dtype in zip(computed, dtypes, strict=False))
        if not template.check(expected, results):
            raise ValueError("its result is not that of the reference")
        candidate.is_trusted = True


def _dtypes_of(template: TraceTemplate, arguments: Mapping[str, Any]) -> list[str]:
    dtypes = template.dtypes(arguments)
    return [dtypes[key] for key in template.outputs]


_applied = _Applied()


def _names(trace: Any, name: str) -> bool:
    """Whether a definition of this name may be one of a function with this trace."""
    prefixes = (template.name_prefix for template in templates_of(trace))
    return any(name == prefix or name.startswith(prefix + "_") for prefix in prefixes)


def _load(solution: Solution) -> Callable[..., Any]:
    """The function of a solution, built from its sources."""
    if solution.spec.binding is SupportedBindings.TORCH and not solution.spec.is_python_family():
        raise ValueError("`binding` must be 'tvm-ffi' for a compiled solution, got 'torch'")
    folder = Path(tempfile.mkdtemp(prefix="flashinfer_solution_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = []
    for source in solution.sources:
        paths.append(folder / source.path)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(source.content)
    name = f"flashinfer_solution_{solution.hash()[:16]}"
    if not solution.spec.is_python_family():
        compiled = [path for path in paths if path.suffix in (".cu", ".cc", ".cpp")]
        module = gen_jit_spec(name, compiled, extra_include_paths=[folder]).build_and_load()
        return cast(Callable[..., Any], getattr(module, solution.entry_symbol()))
    spec = importlib.util.spec_from_file_location(name, folder / solution.entry_file())
    if spec is None or spec.loader is None:
        raise ValueError(f"`entry_point` must be a Python file, got {solution.entry_file()!r}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # for its other files
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return cast(Callable[..., Any], getattr(module, solution.entry_symbol()))


def _read(folder: Path) -> dict[str, Solution]:
    found: dict[str, Solution] = {}
    if not folder.is_dir():
        raise ValueError(f"FLASHINFER_TRACE_APPLY must name a folder of solutions, got {folder}")
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        if "sources" not in data:
            continue  # a definition or a workload
        solution = Solution.from_dict(data)
        if solution.definition in found:
            raise ValueError(
                f"FLASHINFER_TRACE_APPLY must have one solution of {solution.definition!r}, got "
                f"{found[solution.definition].name!r} and {solution.name!r}"
            )
        found[solution.definition] = solution
    return found
