"""Implementations of definitions, in the format of FlashInfer-Bench: a solution has its sources."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any


class SupportedLanguages(str, enum.Enum):
    """Languages that solutions are written in."""

    PYTHON = "python"
    TRITON = "triton"
    CUTEDSL = "cutedsl"
    TILELANG = "tilelang"
    CPP = "cpp"
    CUDA = "cuda"
    CUTLASS = "cutlass"
    CUTILE = "cutile"


class SupportedBindings(str, enum.Enum):
    """How a compiled solution is called."""

    TVM_FFI = "tvm-ffi"
    TORCH = "torch"


_COMPILED = (SupportedLanguages.CPP, SupportedLanguages.CUDA, SupportedLanguages.CUTLASS)


@dataclass(frozen=True)
class SourceFile:
    """One source of a solution.

    Attributes
    ----------
    path : str
        Where it belongs among the sources: relative, without ``..``.
    content : str
        Its text.
    """

    path: str
    content: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts or "\\" in self.path:
            raise ValueError(f"`path` must be relative and without '..', got {self.path!r}")


@dataclass(frozen=True)
class BuildSpec:
    """How a solution is built and called.

    Attributes
    ----------
    language : SupportedLanguages
        The language of its sources.
    target_hardware : sequence of str
        GPUs that it is for, such as ``"NVIDIA_H200"``; for information.
    entry_point : str
        File and function, ``"main.py::run"``.
    dependencies : sequence of str
        Packages that it needs; for information.
    destination_passing_style : bool
        Whether it writes into outputs that it is given after the inputs.
    binding : SupportedBindings, optional
        Compiled languages have one.
    """

    language: SupportedLanguages
    target_hardware: Sequence[str]
    entry_point: str
    dependencies: Sequence[str] = field(default_factory=tuple)
    destination_passing_style: bool = False
    binding: SupportedBindings | None = None

    def __post_init__(self) -> None:
        file, separator, symbol = self.entry_point.partition("::")
        if not (file and separator and symbol.isidentifier()):
            raise ValueError(
                f"`entry_point` must be a file and a function, 'file::function', got "
                f"{self.entry_point!r}"
            )

    def is_python_family(self) -> bool:
        """Whether the sources are Python, with or without kernels in it."""
        return self.language not in _COMPILED

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuildSpec:
        """The specification that `to_dict` gives, or a solution's JSON has."""
        binding = data.get("binding")
        return cls(
            SupportedLanguages(data["language"]),
            tuple(data.get("target_hardware", ())),
            data["entry_point"],
            tuple(data.get("dependencies", ())),
            bool(data.get("destination_passing_style", False)),
            None if binding is None else SupportedBindings(binding),
        )

    def to_dict(self) -> dict[str, Any]:
        """The object that JSON holds."""
        result: dict[str, Any] = {
            "language": self.language.value,
            "target_hardware": list(self.target_hardware),
            "entry_point": self.entry_point,
            "dependencies": list(self.dependencies),
            "destination_passing_style": self.destination_passing_style,
        }
        return result if self.binding is None else {**result, "binding": self.binding.value}


@dataclass(frozen=True)
class Solution:
    """One implementation of a definition.

    Attributes
    ----------
    name : str
        Its own name.
    definition : str
        Name of the definition, such as ``"rmsnorm_h4096"``.
    author : str
        Who wrote it.
    spec : BuildSpec
        How it is built and called.
    sources : sequence of SourceFile
        Its files; the entry point's is one of them, and no path comes twice.
    description : str, optional
        For readers.
    """

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: Sequence[SourceFile]
    description: str | None = None

    def __post_init__(self) -> None:
        paths = [source.path for source in self.sources]
        if len(set(paths)) != len(paths):
            raise ValueError(f"`sources` must have each path once, got {paths}")
        if self.entry_source() is None:
            raise ValueError(
                f"`sources` must have the entry point's file {self.entry_file()!r}, got {paths}"
            )

    def entry_file(self) -> str:
        """Path of the entry point."""
        return self.spec.entry_point.partition("::")[0]

    def entry_symbol(self) -> str:
        """Name of the function to call."""
        return self.spec.entry_point.partition("::")[2]

    def entry_source(self) -> SourceFile | None:
        """The file of the entry point."""
        return next((s for s in self.sources if s.path == self.entry_file()), None)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Solution:
        """The solution that `to_dict` gives, or a file of FlashInfer-Bench has."""
        return cls(
            data["name"],
            data["definition"],
            data["author"],
            BuildSpec.from_dict(data["spec"]),
            tuple(SourceFile(s["path"], s["content"]) for s in data["sources"]),
            data.get("description"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The object that JSON holds."""
        result: dict[str, Any] = {
            "name": self.name,
            "definition": self.definition,
            "author": self.author,
            "spec": self.spec.to_dict(),
            "sources": [{"path": s.path, "content": s.content} for s in self.sources],
        }
        return result if self.description is None else {**result, "description": self.description}

    def hash(self) -> str:
        """SHA-256 of what is built and called: of all but author and description."""
        content = self.to_dict()
        for name in ("author", "description"):
            content.pop(name, None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
