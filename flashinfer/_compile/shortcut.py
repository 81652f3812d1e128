"""Calls of an operator that go around PyTorch's dispatcher.

The dispatcher packs each argument into a value of its own and calls a Python kernel with what it
unpacks again: more host time than a whole eager call. A graph that runs needs none of it. It calls
`torch._ops.OpOverload`, whose attribute ``_op`` is the way into the dispatcher; a function that
looks at the arguments stands there instead, and takes that way where somebody watches the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

_SOURCE = """
def call({leaves}):
    if {plain}not _watchers() and _transforms() is None and not _profiler._is_profiler_enabled:
        {run}
    return _dispatch({leaves})
"""
_WRITE = "{call}; return"
_RETURN = """_returned = {call}
        if type(_returned) in _plain and _returned.is_contiguous():
            return _returned
        return _finish(_returned, {leaves})"""


class Invocation(NamedTuple):
    """The call of a public function, written out: a walk through its pattern takes time.

    Attributes
    ----------
    call : str
        Its source.
    known : dict
        Values of the names in it that are not leaves.
    leaves : mapping of str to bool
        The operator's arguments in order, and whether each is a tensor.
    """

    call: str
    known: dict[str, Any]
    leaves: Mapping[str, bool]

    def function(self) -> Callable[..., Any]:
        """The call as a function of the leaves."""
        function: Callable[..., Any] = eval(
            f"lambda {', '.join(self.leaves)}: {self.call}", self.known
        )
        return function


def skip_dispatch(operator: Any, invocation: Invocation, finish: Callable[..., Any] | None) -> None:
    """Let calls with plain tensors, which nobody watches, go straight to the public function.

    Tensor subclasses (fake tensors of a trace, distributed tensors), modes of
    ``__torch_dispatch__`` and transforms of ``torch.func`` take the dispatcher's way. So does
    everything under the profiler, which then sees the operator's name.

    Parameters
    ----------
    operator : torch._ops.OpOverload
        The operator; nothing has hashed it yet, since its hash is that of ``_op``.
    invocation : Invocation
        The call of the public function.
    finish : callable, optional
        ``finish(returned, *arguments)`` makes the operator's results of what the function returns;
        None for an operator without results.
    """
    dispatch = getattr(operator, "_op", None)
    watchers = getattr(torch._C, "_len_torch_dispatch_stack", None)
    transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    enabled = getattr(profiler, "_is_profiler_enabled", None)
    if not (callable(dispatch) and watchers and transforms and isinstance(enabled, bool)):
        return  # a PyTorch without these internals keeps the dispatcher's way
    tensors = [name for name, is_tensor in invocation.leaves.items() if is_tensor]
    plain = "".join(f"type({name}) in _plain and " for name in tensors)
    names = ", ".join(invocation.leaves)
    run = (_WRITE if finish is None else _RETURN).format(call=invocation.call, leaves=names)
    known: dict[str, Any] = invocation.known | {
        "_plain": frozenset({torch.Tensor, torch.nn.Parameter}),
        "_watchers": watchers,
        "_transforms": transforms,
        "_profiler": profiler,
        "_finish": finish,
        "_dispatch": dispatch,
    }
    exec(_SOURCE.format(leaves=names, plain=plain, run=run), known)
    operator._op = known["call"]
