"""Benchmark definitions from calls: ``fi_trace(flashinfer.rmsnorm, input=x, weight=w)``.

A call's tensors fix the axes and dtypes of its `TraceTemplate`; the result is a FlashInfer-Bench
definition, a JSON object that carries its own reference. With ``FLASHINFER_TRACE_DUMP`` set, every
decorated call writes its definition into ``FLASHINFER_TRACE_DUMP_DIR``, once per definition.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import env
from .._common.locks import ForkSafeLock
from .._common.numbers import plain_arguments
from ..trace.template import resolve_template
from .call import public_path
from .files import make_private_folder

_logger = logging.getLogger("flashinfer.fi_trace")

# A definition's name becomes the name of a file.
_NAME = re.compile(r"[\w-][\w.-]*")

_registered: dict[str, Any] = {}
_dump_lock = ForkSafeLock()
_dumped: set[tuple[Path, str]] = set()
_complaints: set[str] = set()


def fi_trace(
    func_or_method: Callable[..., Any], save_dir: str | Path | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Definition of one call, without making the call.

    Parameters
    ----------
    func_or_method : callable
        A public function, or a bound method such as ``wrapper.run``.
    save_dir : str or Path, optional
        Folder in which ``<name>.json`` is written as well; created if missing. By default that of
        ``FLASHINFER_TRACE_DUMP_DIR``, if it is set.
    **kwargs
        The call's arguments by name; those with a default may be left out. Tensors may be on any
        device: their shapes and dtypes are read, not their values.

    Returns
    -------
    dict
        Definition in the FlashInfer-Bench format.

    Raises
    ------
    TypeError
        If an argument is missing, unknown or of the wrong type.
    ValueError
        If the function has no template, or the arguments do not fit it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w = torch.empty(4, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    >>> flashinfer.fi_trace(flashinfer.rmsnorm, input=x, weight=w)["name"]
    'rmsnorm_h4096'
    """
    name = qualified_name(func_or_method)
    trace = getattr(func_or_method, "__flashinfer_trace__", None) or _registered.get(name)
    if trace is None:
        raise ValueError(f"{name} has no trace template: it is not decorated with trace=")
    arguments = _bind(func_or_method, (), kwargs)
    template = resolve_template(trace, arguments)
    if template is None:
        raise ValueError(f"{name} has no trace template for these arguments")
    definition = template.definition(arguments, name)
    save_dir = env.FLASHINFER_TRACE_DUMP_DIR.get() if save_dir is None else save_dir
    if save_dir is not None:
        save_definition(definition, save_dir)
    return definition


def build_fi_trace_fn(spec: Any) -> Callable[..., dict[str, Any]]:
    """Function of keyword arguments that returns a definition.

    Parameters
    ----------
    spec : TraceTemplate, dispatch function, or decorated function
        The definition of the operation. Of a bare template, the definition's ``fi_api`` tag is the
        template's prefix.
    """
    if hasattr(spec, "__flashinfer_trace__"):
        return lambda save_dir=None, **kwargs: fi_trace(spec, save_dir, **kwargs)

    def trace_call(save_dir: str | Path | None = None, **kwargs: Any) -> dict[str, Any]:
        template = resolve_template(spec, kwargs)
        if template is None:
            raise ValueError(f"{spec!r} has no template for these arguments")
        definition = template.definition(kwargs, template.name_prefix)
        if save_dir is not None:
            save_definition(definition, save_dir)
        return definition

    return trace_call


def register_fi_trace(qualname: str, spec: Any) -> None:
    """Give a function that is not decorated a template.

    Parameters
    ----------
    qualname : str
        Module and qualified name, such as ``"mymodule.myop"``.
    spec : TraceTemplate or dispatch function
    """
    _registered[qualname] = spec


def qualified_name(func_or_method: Callable[..., Any]) -> str:
    """Public module and qualified name of a function or method, decorators looked through."""
    return public_path(inspect.unwrap(getattr(func_or_method, "__func__", func_or_method)))


def save_definition(definition: Mapping[str, Any], save_dir: str | Path) -> Path:
    """Write ``<name>.json`` into `save_dir`; a reader never sees half a file.

    The file, and folders that are created for it, can be read by the user alone.

    Returns
    -------
    Path
        The file, which is not touched if it already has this content.

    Raises
    ------
    ValueError
        If the definition's name is not a plain file name, which would lead out of the folder.
    """
    name = definition["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"definition['name'] must consist of letters, digits, '_', '-' and '.', and not begin "
            f"with '.', got {name!r}"
        )
    directory = Path(save_dir)
    make_private_folder(directory)
    path = directory / f"{name}.json"
    text = json.dumps(definition, indent=2) + "\n"
    if path.is_file() and path.read_text() == text:
        return path
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
    try:
        with open(descriptor, "w") as stream:
            stream.write(text)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def _bind(
    func_or_method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by name, defaults and (for a method) `self` included."""
    signature = inspect.signature(func_or_method)
    named = dict(kwargs)
    if "skip_check" not in signature.parameters:
        named.pop("skip_check", None)  # a keyword of `backend_requirement`, not of the operation
    if not args and next(iter(signature.parameters), None) == "self":
        named.setdefault("self", None)  # `wrapper.run.fi_trace` knows the function, not the object
    bound = signature.bind(*args, **named)
    bound.apply_defaults()
    arguments = plain_arguments(bound.arguments)
    if inspect.ismethod(func_or_method):
        arguments.setdefault("self", func_or_method.__self__)
    return arguments


def dump_definition(
    func: Callable[..., Any], trace: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Write the definition of a call that is about to run, if it is not written yet.

    Never raises: what is wrong with the arguments is for the call itself to say, and a full disk
    must not stop a server.
    """
    try:
        arguments = _bind(func, args, kwargs)
        template = resolve_template(trace, arguments)
        if template is None or template.reference is None:
            return
        directory = (env.FLASHINFER_TRACE_DUMP_DIR.get() or Path.cwd()).absolute()
        key = (directory, template.call_name(arguments))
        with _dump_lock:
            if key not in _dumped:
                save_definition(template.definition(arguments, qualified_name(func)), directory)
                _dumped.add(key)
    except (TypeError, ValueError) as error:
        _logger.debug("no definition for %s: %s", qualified_name(func), error)
    except Exception as error:
        complaint = f"{qualified_name(func)}: {error}"
        if complaint not in _complaints:
            _complaints.add(complaint)
            _logger.warning("cannot write the definition of %s", complaint)
