"""Arguments and results of a call as JSON plus blobs of bytes, and back.

A tensor is stored as the bytes between its first and its last element, and described by dtype,
shape, stride and byte offset. Tensors that overlap share one blob, so that views, aliases and
strides come back as they were. A blob comes back at the same offset from a 256-byte boundary,
because kernels choose code paths by alignment.

In JSON a plain value is itself; anything else is an object whose first key says what it is, such
as ``{"dtype": "bfloat16"}``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._common.dtypes import torch_name
from .names import (
    find_argument,
    find_member,
    find_named_tuple,
    find_type,
    import_path,
    is_known,
)

_ALIGNMENT = 256

# A blob that holds one dense tensor of these is written with its dtype and shape, so that other
# tools can read the file.
_COMMON_DTYPES = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
)


@dataclasses.dataclass
class _Blob:
    """A range of one storage that overlapping tensors share."""

    storage: torch.UntypedStorage
    device: torch.device
    start: int  # address of the first byte
    end: int
    members: list[int]  # indices of tensors

    def read(self) -> torch.Tensor:
        """A copy of the bytes in host memory."""
        offset = self.start - self.storage.data_ptr()
        view = torch.empty(0, dtype=torch.uint8, device=self.device)
        view.set_(self.storage, offset, (self.end - self.start,), (1,))
        return view.to("cpu", copy=True)


class Encoder:
    """Collects the tensors of encoded values; :meth:`group` then finds their memory.

    Parameters
    ----------
    scratch : str
        End of the names of tensors whose content means nothing, and is left out.
    """

    def __init__(self, scratch: str = "") -> None:
        self._scratch = scratch
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._index_of: dict[int, int] = {}

    def encode(self, value: Any, name: str) -> Any:
        """The JSON form of a value that messages call ``name``."""
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, name)
        if isinstance(value, enum.Enum) and is_known(type(value), find_type):
            return {"enum": import_path(type(value)), "name": value.name}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": torch_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{name}.{i}") for i, item in enumerate(value)]
            if isinstance(value, list):
                return items
            if is_known(type(value), find_named_tuple):
                return {"namedtuple": import_path(type(value)), "items": items}
            return {"tuple": items}
        if isinstance(value, Mapping):
            pairs = [
                [self.encode(key, f"{name} key"), self.encode(item, f"{name}.{key}")]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        if isinstance(value, torch.Generator):
            state = self.encode(value.get_state(), f"{name}.state")
            return {"generator": str(value.device), "state": state}
        if is_known(value, find_argument):
            return {"import": import_path(value)}
        return {"object": list(object_key(value)), "type": import_path(type(value))}

    def _encode_tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return {"object": list(object_key(tensor)), "type": "torch:Tensor (not plain strided)"}
        if id(tensor) not in self._index_of:
            index = self._index_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.names.append(name if name not in self.names else f"{name}#{index}")
        return {"tensor": self._index_of[id(tensor)]}

    def group(self) -> list[_Blob]:
        """Blobs over all tensors with data, overlapping tensors together."""
        spans = []
        for index, tensor in enumerate(self.tensors):
            is_scratch = self._scratch and self.names[index].endswith(self._scratch)
            if tensor.numel() > 0 and not tensor.is_meta and not is_scratch:
                reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                spans.append(
                    (str(tensor.device), start, start + (reach + 1) * tensor.itemsize, index)
                )
        blobs: list[_Blob] = []
        for device, start, end, index in sorted(spans):
            last = blobs[-1] if blobs else None
            if last is not None and str(last.device) == device and start < last.end:
                last.end = max(last.end, end)
                last.members.append(index)
                continue
            tensor = self.tensors[index]
            blobs.append(_Blob(tensor.untyped_storage(), tensor.device, start, end, [index]))
        return blobs

    def describe(self, blobs: list[_Blob]) -> list[dict[str, Any]]:
        """Facts about each tensor that :class:`Decoder` needs besides its bytes."""
        home = {index: blob for blob in blobs for index in blob.members}
        described = []
        for index, tensor in enumerate(self.tensors):
            entry: dict[str, Any] = {
                "name": self.names[index],
                "dtype": torch_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "device": str(tensor.device),
                "requires_grad": tensor.requires_grad,
            }
            if index in home:
                blob = home[index]
                entry["blob"] = self.blob_name(blob)
                entry["offset"] = tensor.data_ptr() - blob.start
                entry["alignment"] = blob.start % _ALIGNMENT
            described.append(entry)
        return described

    def blob_name(self, blob: _Blob) -> str:
        """The name of its first tensor in order of arguments, which is in no other blob."""
        return self.names[min(blob.members)]

    def payload(self, blob: _Blob, content: torch.Tensor) -> torch.Tensor:
        """What is written to the file: bytes, or a tensor where that says everything."""
        if len(blob.members) == 1:
            tensor = self.tensors[blob.members[0]]
            if tensor.is_contiguous() and tensor.dtype in _COMMON_DTYPES:
                return content.view(tensor.dtype).reshape(tensor.shape)
        return content


class Decoder:
    """Rebuilds values on a device.

    Parameters
    ----------
    tensors : list of dict
        The result of :meth:`Encoder.describe`.
    blobs : dict of str to torch.Tensor
        Content of each blob, typed or bytes.
    device : torch.device
        Where tensors go that were on a GPU. CPU tensors stay there: an API may want lengths
        on the host.
    objects : mapping
        Objects by ``(process id, id)``, for what JSON cannot hold.
    """

    def __init__(
        self,
        tensors: list[dict[str, Any]],
        blobs: Mapping[str, torch.Tensor],
        device: torch.device,
        objects: Mapping[tuple[int, int], Any],
    ) -> None:
        self._described, self._blobs, self._device, self._objects = tensors, blobs, device, objects
        self._memory: dict[str, torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, index: int) -> torch.Tensor:
        """The tensor of a given index; the same object each time."""
        if index not in range(len(self._described)):
            raise ValueError(f"tensor {index!r} is not among the {len(self._described)} recorded")
        if index not in self._tensors:
            self._tensors[index] = self._build(self._described[index])
        return self._tensors[index]

    def decode(self, node: Any) -> Any:
        """The value of a JSON node.

        Raises
        ------
        ValueError
            If it is no node, or refers to an object that is not in ``objects``.
        """
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), None)
        if tag not in _DECODERS:
            raise ValueError(f"a value of a kind that this version does not know: {node!r:.200}")
        return _DECODERS[tag](self, node)

    def place(self, device: str) -> torch.device:
        """Where something goes that was on ``device``."""
        recorded = torch.device(device)
        return self._device if recorded.type == "cuda" else recorded

    def find_object(self, node: Mapping[str, Any]) -> Any:
        key = tuple(node["object"])
        try:
            return self._objects[key]
        except KeyError:
            raise ValueError(
                f"this call uses object {key} of {node['type']}, which a dump does not hold: "
                "replay the folder with the call that created it, or pass it in object_registry"
            ) from None

    def _build(self, entry: Mapping[str, Any]) -> torch.Tensor:
        dtype, device = _dtype(entry["dtype"]), self.place(entry["device"])
        shape, stride = entry["shape"], entry["stride"]
        if "blob" not in entry:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        memory = self._load(entry["blob"], entry["alignment"], device)
        offset = entry["offset"]
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        # set_() would enlarge the memory, and the tensor would show what was there before.
        is_inside = min([offset, *shape, *stride]) >= 0 and offset % dtype.itemsize == 0
        if not is_inside or offset + (reach + 1) * dtype.itemsize > memory.numel():
            raise ValueError(
                f"tensor {entry['name']!r} of shape {shape}, strides {stride} and {dtype} at byte "
                f"{offset} does not lie in the {memory.numel()} bytes that were recorded"
            )
        first = (memory.storage_offset() + offset) // dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(memory.untyped_storage(), first, shape, stride)
        return tensor.requires_grad_(entry["requires_grad"])

    def _load(self, name: str, alignment: int, device: torch.device) -> torch.Tensor:
        if name not in self._memory:
            saved = self._blobs[name]
            if not saved.is_contiguous():
                raise ValueError(f"the memory {name!r} must be saved as a contiguous tensor")
            content = saved.reshape(-1).view(torch.uint8)
            room = torch.empty(content.numel() + _ALIGNMENT, dtype=torch.uint8, device=device)
            skip = (alignment - room.data_ptr()) % _ALIGNMENT
            memory = room[skip : skip + content.numel()]
            memory.copy_(content)
            self._memory[name] = memory
        return self._memory[name]


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must name a dtype of torch such as 'float16', got {name!r}")
    return found


def _decode_generator(decoder: Decoder, node: Mapping[str, Any]) -> torch.Generator:
    generator = torch.Generator(decoder.place(node["generator"]))
    # A clone: set_state ignores the storage offset that a restored tensor has.
    generator.set_state(decoder.decode(node["state"]).clone())
    return generator


_DECODERS: dict[str, Callable[[Decoder, Any], Any]] = {
    "tensor": lambda decoder, node: decoder.tensor(node["tensor"]),
    "enum": lambda decoder, node: find_member(node["enum"], node["name"]),
    "float": lambda decoder, node: float(node["float"]),
    "dtype": lambda decoder, node: _dtype(node["dtype"]),
    "device": lambda decoder, node: decoder.place(node["device"]),
    "size": lambda decoder, node: torch.Size(node["size"]),
    "tuple": lambda decoder, node: tuple(decoder.decode(node["tuple"])),
    "namedtuple": lambda decoder, node: find_named_tuple(node["namedtuple"])._make(
        decoder.decode(node["items"])
    ),
    "dict": lambda decoder, node: {decoder.decode(k): decoder.decode(v) for k, v in node["dict"]},
    "generator": _decode_generator,
    "import": lambda decoder, node: find_argument(node["import"]),
    "object": lambda decoder, node: decoder.find_object(node),
}


def object_key(value: Any) -> tuple[int, int]:
    """Identity of an object across the processes of one run."""
    return os.getpid(), id(value)
