"""Running calls again that level 10 of ``@flashinfer_api`` dumped, and comparing what they return.

A dump is data. It may name operations and types of this package, and operations of modules that the
program has imported itself. Loading a dump runs none of them. A dump that is damaged, or that names
anything else, is refused with a ValueError.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .call import paused
from .dump import FORMAT
from .names import find_operation, find_owner
from .values import Decoder

# (relative, absolute). A call repeated on the same GPU agrees bit for bit; on another one the order
# of sums may differ, which costs a few units in the last place of the type.
_TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
    torch.float8_e4m3fn: (0.15, 0.02),
    torch.float8_e5m2: (0.3, 0.02),
}


# The entries of metadata.json, by the type that JSON gives them. The names are those of `dump.py`.
_ENTRIES: dict[str, tuple[type, ...]] = {
    "api": (str,),
    "function": (str,),
    "run": (str,),
    "number": (int,),
    "parent": (int, type(None)),
    "status": (str,),
    "owner": (dict, type(None)),
    "args": (list,),
    "kwargs": (dict,),
    "inputs": (dict,),
}
_FILES = ("inputs.pt", "inputs.safetensors", "outputs.pt", "outputs.safetensors")


def replay_from_dump(
    dump_dir: str,
    compare_outputs: bool = False,
    device: str = "cuda",
    run: bool = False,
    object_registry: dict[tuple[int, int], Any] | None = None,
) -> dict[str, Any]:
    """Load one dumped call, and run it again if asked.

    Parameters
    ----------
    dump_dir : str
        Folder of the call, the one with ``metadata.json``.
    compare_outputs : bool
        Run it and compare with the recorded outputs: bit for bit, else within a tolerance by dtype.
    device : str
        Where tensors go that were on a GPU.
    run : bool
        Run it.
    object_registry : dict, optional
        Objects by ``(process id, id)`` for methods and arguments that are objects. A replayed
        ``__init__`` adds the object it creates.

    Returns
    -------
    dict
        ``dump_dir``, ``api``, ``metadata`` (as recorded), ``args``, ``kwargs`` and ``tensors``
        (input tensors by name). After a run ``execution_result`` and ``error`` (the exception, None
        if there was none). After a comparison ``comparison_match`` (bool) and ``differences`` (list
        of str; a line that ends in "within tolerance" is no mismatch).

    Raises
    ------
    ValueError
        If the folder is no dump of this format or a damaged one, or refers to something that cannot
        be found, or the device is not there.
    """
    folder = Path(dump_dir)
    metadata = _load_metadata(folder)
    registry = object_registry if object_registry is not None else {}
    with _explained(folder, "loaded"):
        _require_device(device, metadata)
        inputs = _decoder(folder, metadata["inputs"], device, registry)
        args = [inputs.decode(node) for node in metadata["args"]]
        kwargs = {name: inputs.decode(node) for name, node in metadata["kwargs"].items()}
        names = [entry["name"] for entry in metadata["inputs"]["tensors"]]
        tensors = {name: inputs.tensor(index) for index, name in enumerate(names)}
    replay: dict[str, Any] = {
        "dump_dir": str(folder),
        "api": metadata["api"],
        "metadata": metadata,
        "args": args,
        "kwargs": kwargs,
        "tensors": tensors,
    }
    if run or compare_outputs:
        with _explained(folder, "run"):
            function, args = _find_call(metadata, args, inputs, registry)
        replay |= _run(function, args, kwargs)
    if compare_outputs:
        with _explained(folder, "compared"):
            differences = _compare_with_record(folder, replay, inputs, device, registry)
        replay["differences"] = differences
        replay["comparison_match"] = all(line.endswith(_TOLERATED) for line in differences)
    return replay


def replay_sequence(root_dir: str, device: str = "cuda") -> list[dict[str, Any]]:
    """Run every call dumped under a folder again, process after process, and compare.

    Calls made from inside another dumped call are left out: they are repeated with it. Objects are
    created by their dumped ``__init__`` and used by the methods that follow.

    Parameters
    ----------
    root_dir : str
        ``FLASHINFER_DUMP_DIR`` of the recording.
    device : str
        Where tensors go that were on a GPU.

    Returns
    -------
    list of dict
        For each call what :func:`replay_from_dump` returns with ``compare_outputs=True``. A call
        that cannot be loaded or set up has ``error`` and ``comparison_match`` False; the next ones
        are tried. Dumps without readable metadata come last, with an empty ``metadata``.

    Raises
    ------
    ValueError
        If there is no dump under ``root_dir``.
    """
    folders = sorted(path.parent for path in Path(root_dir).glob("*/metadata.json"))
    if not folders:
        raise ValueError(f"root_dir must hold dumps (folders with metadata.json), got {root_dir}")
    calls, unreadable = [], []
    for folder in folders:
        try:
            calls.append((folder, _load_metadata(folder)))
        except ValueError as error:
            unreadable.append(_not_run(folder, {}, error))
    calls.sort(key=lambda call: (call[1]["run"], call[1]["number"]))
    dumped = {(metadata["run"], metadata["number"]) for _, metadata in calls}
    objects: dict[str, dict[tuple[int, int], Any]] = {metadata["run"]: {} for _, metadata in calls}
    replays = []
    for folder, metadata in calls:
        if (metadata["run"], metadata["parent"]) in dumped:
            continue
        registry = objects[metadata["run"]]
        try:
            replays.append(replay_from_dump(str(folder), True, device, True, registry))
        except ValueError as error:
            replays.append(_not_run(folder, metadata, error))
    return replays + unreadable


def _not_run(folder: Path, metadata: dict[str, Any], error: ValueError) -> dict[str, Any]:
    """What stands for a call that cannot be set up."""
    return {
        "dump_dir": str(folder),
        "api": metadata.get("api", "unknown"),
        "metadata": metadata,
        "error": error,
        "comparison_match": False,
        "differences": [f"not run: {error}"],
    }


@contextlib.contextmanager
def _explained(folder: Path, verb: str) -> Iterator[None]:
    """Turn whatever a damaged dump leads to into a ValueError that names the folder."""
    try:
        yield
    except Exception as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} cannot be {verb}: {reason}") from error


def _load_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise FileNotFoundError(f"{path} is missing or not a file")
        metadata = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"dump_dir must hold a readable metadata.json, got {folder}: {error}"
        ) from error
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} must hold an object, got {type(metadata).__name__}")
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{folder} has dump format {metadata.get('format')}, this version reads {FORMAT}"
        )
    for name, types in _ENTRIES.items():
        if name not in metadata or not isinstance(metadata[name], types):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            got = repr(metadata[name])[:100] if name in metadata else "nothing"
            raise ValueError(f"{path}: {name!r} must be {expected}, got {got}")
    return metadata


def _require_device(device: str, metadata: Mapping[str, Any]) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device must name a device such as 'cuda:0', got {device!r}") from error
    recorded = {entry["device"].partition(":")[0] for entry in metadata["inputs"]["tensors"]}
    if kind == "cuda" and "cuda" in recorded and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} is not available here; device='cpu' loads the dump, and runs it "
            "with FLASHINFER_BACKEND=reference"
        )


def _decoder(
    folder: Path, saved: Mapping[str, Any], device: str, registry: Mapping[tuple[int, int], Any]
) -> Decoder:
    path = folder / saved["file"]
    if saved["file"] not in _FILES or not path.is_file():
        raise ValueError(f"'file' must be one of {', '.join(_FILES)} there, got {saved['file']!r}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        blobs = load_file(path)
    else:
        # With weights_only, unpickling makes tensors and containers, and calls nothing else.
        blobs = torch.load(path, map_location="cpu", weights_only=True)
    return Decoder(saved["tensors"], blobs, torch.device(device), registry)


def _find_call(
    metadata: Mapping[str, Any],
    args: list[Any],
    inputs: Decoder,
    registry: dict[tuple[int, int], Any],
) -> tuple[Callable[..., Any], list[Any]]:
    """The operation, and its positional arguments with the object that it is a method of."""
    function, owner = find_operation(metadata["function"]), metadata["owner"]
    if owner is None:
        return function, args
    if function.__name__ != "__init__":
        return function, [inputs.find_object(owner), *args]
    cls: Any = find_owner(owner["type"], metadata["function"])
    target = registry[tuple(owner["object"])] = cls.__new__(cls)
    return function, [target, *args]


def _run(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    with paused():
        try:
            return {"execution_result": function(*args, **kwargs), "error": None}
        except Exception as error:
            return {"execution_result": None, "error": error}


def _compare_with_record(
    folder: Path,
    replay: Mapping[str, Any],
    inputs: Decoder,
    device: str,
    registry: Mapping[tuple[int, int], Any],
) -> list[str]:
    """The differences, one line each."""
    metadata, error = replay["metadata"], replay["error"]
    if metadata["status"] == "raised":
        if error is None:
            return [f"recorded: raised {metadata['error']}; now: returned"]
        same = type(error).__name__ == metadata["error"].partition(":")[0]
        return [] if same else [f"recorded: raised {metadata['error']}; now: raised {error!r}"]
    if error is not None:
        return [f"recorded: {metadata['status']}; now: raised {type(error).__name__}: {error}"]
    if "outputs" not in metadata:
        reason = metadata.get("outputs_missing", "the recorded call did not end")
        return [f"no recorded outputs: {reason}"]
    expected = _decoder(folder, metadata["outputs"], device, registry)
    pairs = list(_leaves("result", replay["execution_result"], metadata["result"], expected))
    # An argument that should have stayed as it was is compared with what it was.
    before = _decoder(folder, metadata["inputs"], device, registry)
    for index, entry in enumerate(metadata["inputs"]["tensors"]):
        if "blob" not in entry:  # nothing was recorded of what it holds
            continue
        node = metadata["changed"].get(str(index))
        wanted = expected.decode(node) if node is not None else before.tensor(index)
        pairs.append((entry["name"], inputs.tensor(index), wanted))
    lines = (_difference(name, got, wanted) for name, got, wanted in pairs)
    return [line for line in lines if line]


def _leaves(name: str, got: Any, node: Any, expected: Decoder) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of what came back and what was recorded, down to tensors and plain values."""
    items = node
    if isinstance(node, dict):
        items = node.get("tuple", node.get("items", node.get("dict")))
    if (
        isinstance(items, list)
        and isinstance(got, (list, tuple, Mapping))
        and len(got) == len(items)
    ):
        values = got.items() if isinstance(got, Mapping) else enumerate(got)
        for (key, value), item in zip(values, items, strict=True):
            inner = item[1] if isinstance(got, Mapping) else item
            yield from _leaves(f"{name}.{key}", value, inner, expected)
    elif isinstance(node, dict) and "object" in node:
        return  # an object has no recorded value
    else:
        yield name, got, expected.decode(node)


_TOLERATED = "within tolerance"


def _difference(name: str, got: Any, wanted: Any) -> str:
    """One line, or nothing if equal; it ends in ``within tolerance`` where that is so."""
    different = f"{name}: got {_short(got)}, recorded {_short(wanted)}"
    if not isinstance(wanted, torch.Tensor) or not isinstance(got, torch.Tensor):
        # Containers come this far only if their structure differs.
        if type(got) is not type(wanted) or type(wanted) in (list, tuple, dict):
            return different
        return "" if got == wanted or got != got and wanted != wanted else different
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return different
    got, wanted = got.detach().contiguous().cpu(), wanted.detach().contiguous().cpu()
    unequal = int((_bytes(got) != _bytes(wanted)).sum())
    if unequal and got.dtype in _TOLERANCES:
        return _float_difference(name, got, wanted)
    return f"{name}: {unequal} of {got.nbytes} bytes differ ({got.dtype})" if unequal else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _float_difference(name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    relative, absolute = _TOLERANCES[got.dtype]
    x, y = got.reshape(-1).double(), wanted.reshape(-1).double()
    error = (x - y).abs() / (absolute + relative * y.abs())
    error = torch.where(
        (x == y) | (x.isnan() & y.isnan()), 0.0, error.nan_to_num(math.inf, math.inf)
    )
    worst = int(error.argmax())
    outside = int((error > 1).sum())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
    text = f"worst at {index}: got {x[worst]:.6g}, recorded {y[worst]:.6g}"
    if outside:
        return f"{name}: {outside} of {x.numel()} elements differ beyond tolerance, {text}"
    differing = int((error > 0).sum())
    if not differing:
        return ""  # zeros of another sign, or NaNs of another payload
    return f"{name}: {differing} of {x.numel()} elements differ, {text}, {_TOLERATED}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value)[:100]
