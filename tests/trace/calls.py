"""One call of each public operation, for the tests that walk them all."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import flashinfer
from flashinfer._instrument.decorator import traced_functions
from flashinfer.cute_dsl import is_cute_dsl_available
from flashinfer.testing.tensors import iter_tensors
from flashinfer.trace.specs import argument_of
from flashinfer.trace.template import TraceTemplate, templates_of
from tests.trace import attention_cases

_DELTA_RULE = {
    **dict.fromkeys(("num_heads", "num_q_heads", "num_k_heads"), 3),
    **dict.fromkeys(("num_v_heads", "num_state_heads"), 6),
    "head_dim_k": 32,
    "head_dim_v": 64,
}
# Sizes of the axes of an operation whose size its kernels do not take freely.
SIZES = {
    "gdn": _DELTA_RULE,
    "gdn2": _DELTA_RULE,
    "kda": {"num_heads": 3, "num_v_heads": 6, "head_dim_k": 32, "head_dim_v": 64},
    "rmsnorm": {"head_dim": 16},
    "ssd": {"num_heads": 6, "num_groups": 3, "head_dim": 64, "dstate": 128},
    "checkpointing_ssu": {"num_groups": 3, "num_heads": 6, "dstate": 16, "num_rows": 9},
    "selective_state_update": {"num_groups": 3, "num_heads": 6, "dstate": 16},
    "mhc": {"streams": 4, "mixes": 24, "parts": 3, "one": 1},
}


@dataclass(frozen=True)
class Operation:
    """A registered public function and one template of it."""

    function: Callable[..., Any]
    template: TraceTemplate

    @property
    def label(self) -> str:
        return f"{self.function.__qualname__}-{self.template.name_prefix}"

    @property
    def api(self) -> Callable[..., Any]:
        """The function as users see it, with every decorator; a method takes its object as `self`.

        The object is an argument, so that each test's call can have one of its own.
        """
        found: Any = importlib.import_module(self.function.__module__)
        for name in self.function.__qualname__.split("."):
            found = getattr(found, name)
        return found

    def arguments(
        self,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> dict[str, Any]:
        """Random arguments at a small shape whose axes all differ."""
        if "self" in inspect.signature(self.function).parameters:
            return attention_cases.planned_call(self.template, dtype, torch.device(device), seed)
        sizes = {axis: 3 + 5 * i for i, axis in enumerate(self.template.axes)}
        sizes |= SIZES.get(self.template.op_type, {})
        return self.template.example_arguments(sizes, dtype, device, seed)


def import_all_public_modules() -> None:
    """Import every module of the package, so that every decorator has run."""
    for module in pkgutil.iter_modules(flashinfer.__path__, "flashinfer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def operations() -> list[Operation]:
    """Every registered (function, template) pair of the package; each template once."""
    import_all_public_modules()
    found: dict[tuple[int, int], Operation] = {}
    for function, trace in traced_functions:
        if not function.__module__.startswith("flashinfer."):
            continue  # a test's own function
        for template in templates_of(trace):
            found.setdefault((id(function), id(template)), Operation(function, template))
    return list(found.values())


def runs_on(operation: Operation, device: str) -> bool:
    """Operations of CuTe-DSL need its compiler on a GPU, which not every environment has."""
    of_dsl = ".cute_dsl" in operation.function.__module__
    return device == "cpu" or not of_dsl or is_cute_dsl_available()


def results_of(
    template: TraceTemplate, arguments: dict[str, Any], returned: Any
) -> tuple[torch.Tensor, ...]:
    """The outputs of a call in the order of the template: written arguments, and what it returned
    for the others."""
    fresh = iter_tensors(returned)
    given = [argument_of(key, spec, arguments) for key, spec in template.outputs.items()]
    return tuple(next(fresh) if tensor is None else tensor for tensor in given)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of the public signature, without `self`."""
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters
