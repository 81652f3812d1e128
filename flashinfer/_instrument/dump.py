"""Level 10 of ``@flashinfer_api``: each call in a folder of its own, to be replayed elsewhere.

``FLASHINFER_DUMP_DIR/<time>_pid<pid>_<number>_<api>/`` holds

- ``metadata.json``: function, arguments, status (``called``, ``returned``, ``raised``);
- ``inputs.pt`` or ``inputs.safetensors``: on disk before the call starts; without what workspaces
  hold;
- ``outputs.pt`` or ``outputs.safetensors``: what it returned, and the arguments that it changed.

Folders and files can be read by the user alone (modes 0700 and 0600), since they hold the tensors
of prompts. The limits ``FLASHINFER_DUMP_MAX_COUNT`` and ``FLASHINFER_DUMP_MAX_SIZE_GB`` are per
process. A dump that cannot be made (disk full, no permission) is reported and does not disturb the
call.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import torch

from .. import env
from .._common.locks import ForkSafeLock
from ..version import __version__
from .call import ApiCall, is_capturing, matches
from .files import make_private_folder, private
from .names import import_path
from .text import warn_once, write_record
from .values import Encoder, object_key

FORMAT = 1

# Names this run of the program together with the process id, which containers use again and again.
_STARTED = datetime.datetime.now().isoformat()

_GIGABYTE = 10**9

# Arguments with such names are memory of hundreds of megabytes to work in, for each wrapper.
_SCRATCH = "workspace_buffer"

# Disk and CUDA errors, and values that nobody foresaw: the call itself must still run.
_HARMLESS = (OSError, RuntimeError, ValueError, TypeError)


class _Budget:
    """How much this process may still dump."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self.count = 0
        self.nbytes = 0

    def take(self, count: int, nbytes: int) -> str:
        """Take from the budget; else the limit that stands against it."""
        with self._lock:
            most = env.FLASHINFER_DUMP_MAX_COUNT.get()
            size = env.FLASHINFER_DUMP_MAX_SIZE_GB.get()
            if self.count + count > most:
                return f"FLASHINFER_DUMP_MAX_COUNT={most} is reached"
            if self.nbytes + nbytes > size * _GIGABYTE:
                return f"FLASHINFER_DUMP_MAX_SIZE_GB={size:g} is reached"
            self.count += count
            self.nbytes += nbytes
            return ""


_budget = _Budget()
_open_dumps = threading.local()  # .stack: the dumps of calls that this thread is in


def dump_inputs(call: ApiCall) -> Dump | None:
    """Write the inputs of a call that is about to run; None where it is not dumped.

    Raises
    ------
    ModuleNotFoundError
        If ``FLASHINFER_DUMP_SAFETENSORS=1`` and the package safetensors is missing.
    """
    included = env.FLASHINFER_DUMP_INCLUDE.get()
    if included and not matches(call, included):
        return None
    if matches(call, env.FLASHINFER_DUMP_EXCLUDE.get()):
        return None
    if is_capturing():
        write_record(f"#{call.number} {call.name} not dumped: CUDA graph capture")
        return None
    try:
        return Dump.begin(call)
    except _HARMLESS as error:
        _report(call.number, call.name, error)
        return None


def _report(number: int, name: str, error: BaseException) -> None:
    write_record(f"#{number} {name} not dumped: {type(error).__name__}: {error}")


class Dump:
    """The folder of one call."""

    def __init__(self, folder: Path, metadata: dict[str, Any], inputs: Encoder) -> None:
        self.folder = folder
        self.metadata = metadata
        self._inputs = inputs
        self._blobs = inputs.group()
        self._before: list[torch.Tensor] = []

    @classmethod
    def begin(cls, call: ApiCall) -> Dump | None:
        """Create the folder with the inputs; None if a limit is reached."""
        metadata, inputs = _describe_call(call)
        dump = cls(_folder_of(call), metadata, inputs)
        refusal = _budget.take(1, sum(blob.end - blob.start for blob in dump._blobs))
        if refusal:
            warn_once(f"no more dumps: {refusal}")
            write_record(f"#{call.number} {call.name} not dumped: {refusal}")
            return None
        make_private_folder(dump.folder)
        try:
            dump._before = [blob.read() for blob in dump._blobs]
            metadata["inputs"] = dump._save("inputs", inputs, dump._before)
            dump._save_metadata()
        except BaseException:
            # Half a dump is of no use, and a full disk fills up with one for each call.
            shutil.rmtree(dump.folder, ignore_errors=True)
            raise
        _stack().append(dump)
        return dump

    def outputs(self, result: Any) -> None:
        """Add what the call returned and which arguments it changed."""
        _stack().remove(self)
        try:
            self._write_outputs(result)
        except _HARMLESS as error:
            _report(self.metadata["number"], self.metadata["api"], error)

    def failed(self, error: BaseException) -> None:
        """Record that the call raised."""
        _stack().remove(self)
        self.metadata |= {"status": "raised", "error": f"{type(error).__name__}: {error}"}
        try:
            self._save_metadata()
        except OSError as problem:
            _report(self.metadata["number"], self.metadata["api"], problem)

    def _write_outputs(self, result: Any) -> None:
        outputs = Encoder()
        self.metadata["status"] = "returned"
        self.metadata["result"] = outputs.encode(result, "result")
        changed = [
            index
            for blob, before in zip(self._blobs, self._before, strict=True)
            if not torch.equal(blob.read(), before)
            for index in blob.members
        ]
        self.metadata["changed"] = {
            index: outputs.encode(self._inputs.tensors[index], self._inputs.names[index])
            for index in changed
        }
        blobs = outputs.group()
        refusal = _budget.take(0, sum(blob.end - blob.start for blob in blobs))
        if refusal:
            warn_once(f"no more dumps: {refusal}")
            self.metadata["outputs_missing"] = refusal
        else:
            content = [blob.read() for blob in blobs]
            self.metadata["outputs"] = self._save("outputs", outputs, content)
        self._save_metadata()

    def _save(self, stem: str, encoder: Encoder, content: list[torch.Tensor]) -> dict[str, Any]:
        """Write the blobs of an encoder; returns what the metadata says of them."""
        blobs = encoder.group()
        payload = {
            encoder.blob_name(blob): encoder.payload(blob, data)
            for blob, data in zip(blobs, content, strict=True)
        }
        if env.FLASHINFER_DUMP_SAFETENSORS.get():
            file = f"{stem}.safetensors"
            data = _safetensors().save(payload)
            _write(self.folder / file, lambda stream: stream.write(data))
        else:
            file = f"{stem}.pt"
            _write(self.folder / file, lambda stream: torch.save(payload, stream))
        return {"file": file, "tensors": encoder.describe(blobs)}

    def _save_metadata(self) -> None:
        text = json.dumps(self.metadata, indent=1).encode()
        unfinished = self.folder / "metadata.json.tmp"
        _write(unfinished, lambda stream: stream.write(text))
        os.replace(unfinished, self.folder / "metadata.json")


def _describe_call(call: ApiCall) -> tuple[dict[str, Any], Encoder]:
    inputs = Encoder(_SCRATCH)
    first = 0 if call.owner is None else 1
    names = list(call.arguments)  # in the order of the call, positional ones first
    args = [inputs.encode(v, name) for name, v in zip(names, call.args[first:], strict=False)]
    kwargs = {name: inputs.encode(value, name) for name, value in call.kwargs.items()}
    stack = _stack()
    metadata: dict[str, Any] = {
        "format": FORMAT,
        "api": call.name,
        "function": import_path(call.func),
        "number": call.number,
        "process_id": os.getpid(),
        "run": f"{_STARTED} pid {os.getpid()}",
        # A call made by another dumped call is repeated by replaying that one.
        "parent": stack[-1].metadata["number"] if stack else None,
        "time": datetime.datetime.now().isoformat(),
        "flashinfer": __version__,
        "torch": torch.__version__,
        "owner": None,
        "args": args,
        "kwargs": kwargs,
        "status": "called",
    }
    if call.owner is not None:
        owner = {"object": list(object_key(call.owner)), "type": import_path(type(call.owner))}
        metadata["owner"] = owner
    return metadata, inputs


def _folder_of(call: ApiCall) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S.%f")
    name = re.sub(r"[^\w.]", "_", call.name)
    root = Path(env.FLASHINFER_DUMP_DIR.get()).expanduser()
    return root / f"{now}_pid{os.getpid()}_{call.number:06d}_{name}"


def _stack() -> list[Dump]:
    if not hasattr(_open_dumps, "stack"):
        _open_dumps.stack = []
    return _open_dumps.stack


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "FLASHINFER_DUMP_SAFETENSORS=1 needs the package safetensors: pip install safetensors"
        ) from error
    return safetensors.torch


def _write(path: Path, write: Any) -> None:
    """Write a file and wait until it is on disk: the call that follows may kill the process."""
    with open(path, "wb", opener=private) as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
