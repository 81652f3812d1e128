"""How ``@flashinfer_api`` writes a call as text, and where the text goes."""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import torch

from .. import env
from .._common.dtypes import torch_name
from .._common.locks import ForkSafeLock
from .call import ApiCall, is_capturing, matches
from .files import AppendedFile

_files: dict[str, AppendedFile] = {}
_warned: set[str] = set()
_lock = ForkSafeLock()

_MAX_ITEMS = 64  # of a list or a dict: a record stays readable
_MAX_TEXT = 200
_PLAIN = (int, float, complex, str, bytes, list, tuple, torch.dtype, torch.device, enum.Enum)
_WITHOUT_MINIMUM = (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def write_record(text: str) -> None:
    """Write one record to ``FLASHINFER_LOGDEST`` so that it survives a crash right after.

    A file is appended to and synced to disk. A destination that cannot be written to must not
    break or stop the program that is being debugged: the record goes to stderr instead, after one
    warning. The streams stdout and stderr are the program's own, and block where its prints block.
    """
    now = datetime.datetime.now().isoformat(" ", "milliseconds")
    record = f"[flashinfer {now} {os.getpid()}] {text}\n"
    destination = env.FLASHINFER_LOGDEST.get()
    if destination in ("stdout", "stderr"):
        _write_stream(destination, record)
        return
    path = os.path.expanduser(destination.replace("%i", str(os.getpid())))
    try:
        with _lock:
            _files.setdefault(path, AppendedFile(path)).append(record.encode(errors="replace"))
    except OSError as error:
        warn_once(f"cannot write API log FLASHINFER_LOGDEST={destination}: {error}")
        _write_stream("stderr", record)


def warn_once(message: str) -> None:
    """Print a warning about logging itself to stderr, the first time only."""
    if message not in _warned:
        _warned.add(message)
        _write_stream("stderr", f"[flashinfer] warning: {message}\n")


def _write_stream(name: str, text: str) -> None:
    # A daemon may have closed the stream or have none, and the reader of a pipe may be gone.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream = getattr(sys, name)
        stream.write(text)
        stream.flush()


def describe_inputs(call: ApiCall, level: int) -> str:
    """The record written before a call."""
    head = f"#{call.number} {call.name}"
    if level < 3:
        return head
    lines = [f"{head} called"]
    if call.owner is not None:
        lines.append(f"  self = {_object(call.owner)}")
    statistics = _statistics_mode(call, level)
    lines += [f"  {n} = {describe(v, statistics)}" for n, v in call.arguments.items()]
    lines += [f"  {n} = {describe(v, '')} (default)" for n, v in call.defaults.items()]
    return "\n".join(lines)


def describe_outputs(call: ApiCall, result: Any, level: int) -> str:
    """The record written after a call."""
    statistics = _statistics_mode(call, level)
    text = f"#{call.number} {call.name} returned {describe(result, statistics)}"
    if result is None and statistics == "yes":
        # What returns nothing worked in place: the arguments are the outputs.
        changed = [(name, value) for name, value in call.arguments.items() if _has_tensor(value)]
        text += "".join(f"\n  {name} is now {describe(v, statistics)}" for name, v in changed)
    return text


def _statistics_mode(call: ApiCall, level: int) -> str:
    """ "" for none, "yes", or the reason why there are none."""
    if level < 5:
        return ""
    if matches(call, env.FLASHINFER_DUMP_EXCLUDE.get()):
        return "FLASHINFER_DUMP_EXCLUDE"
    return "CUDA graph capture" if is_capturing() else "yes"


def describe(value: Any, statistics: str) -> str:
    """One argument or result as text."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, statistics)
    if isinstance(value, Mapping):
        return _listed(value, [(repr(key), item) for key, item in value.items()], statistics)
    if _has_tensor(value):
        return _listed(value, [(f"[{i}]", item) for i, item in enumerate(value)], statistics)
    if value is None or isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text)} characters)"
    return _object(value)


def _listed(container: Any, items: list[tuple[str, Any]], statistics: str) -> str:
    lines = [f"{label}: {describe(item, statistics)}" for label, item in items[:_MAX_ITEMS]]
    if len(items) > _MAX_ITEMS:
        lines.append(f"... {len(items) - _MAX_ITEMS} more")
    head = f"{type(container).__name__} of {len(items)}"
    return "\n".join([head, textwrap.indent("\n".join(lines), "    ")])


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, (torch.Tensor, Mapping))


def _object(value: Any) -> str:
    # Not repr(): a user's __repr__ may read tensors, and would run before the call it is to
    # protect.
    return f"<{type(value).__module__}.{type(value).__qualname__} at {id(value):#x}>"


def _tensor(tensor: torch.Tensor, statistics: str) -> str:
    dtype = torch_name(tensor.dtype)
    text = f"Tensor(shape={tuple(tensor.shape)}, dtype={dtype}, device={tensor.device}"
    if tensor.layout is torch.strided:
        text += f", stride={tensor.stride()}, contiguous={tensor.is_contiguous()}"
    else:
        text += f", layout={tensor.layout}"
    text += ", requires_grad=True)" if tensor.requires_grad else ")"
    if statistics == "yes":
        return f"{text} {_statistics(tensor)}"
    return f"{text} no statistics: {statistics}" if statistics else text


def _statistics(tensor: torch.Tensor) -> str:
    """min, max and mean of the finite elements, counts of the others."""
    if tensor.is_meta:
        return "no statistics: meta tensor"
    if tensor.numel() == 0:
        return "no statistics: empty"
    try:
        with torch.no_grad():
            values = tensor.detach()
            if values.is_complex():
                return "no statistics: complex"
            if not values.is_floating_point():
                if values.dtype in _WITHOUT_MINIMUM:
                    values = values.to(torch.int64)
                low, high = values.min().item(), values.max().item()
                mean = values.sum(dtype=torch.float64).item() / values.numel()
                return f"min={low} max={high} mean={mean:.6g}"
            if values.itemsize == 1:  # most reductions do not exist for fp8
                values = values.float()
            nan = int(values.isnan().sum())
            inf = int(values.isinf().sum())
            if nan or inf:
                values = values[values.isfinite()]
            if values.numel() == 0:
                return f"nan={nan} inf={inf}, nothing finite"
            low, high = values.min().item(), values.max().item()
            mean = values.mean(dtype=torch.promote_types(values.dtype, torch.float32)).item()
            return f"min={low:.6g} max={high:.6g} mean={mean:.6g} nan={nan} inf={inf}"
    except (RuntimeError, TypeError, NotImplementedError) as error:
        # A dtype without reductions, or an earlier kernel that failed: a note here, the call itself
        # will tell.
        return f"no statistics: {str(error).strip().splitlines()[0]}"
