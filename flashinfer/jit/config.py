"""The configuration of a module: one frozen dataclass from which its name and defines follow."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from typing import Any, ClassVar

from .._common.dtypes import short_name, torch_name

_MAX_URI = 160  # file names end at 255, and suffixes follow


class ModuleConfig:
    """Base of the frozen dataclasses that say how a module is specialised.

    A subclass sets `module` and declares fields of type ``torch.dtype``, ``bool``, ``int``,
    ``str`` or ``Enum``. Everything that distinguishes two builds must be a field: the URI, the
    ``-D`` flags and, through these, the fingerprint are made from the fields alone.

    Attributes
    ----------
    module : str
        Name of the family, with which the URI starts.
    supported_major_versions : tuple of int or None
        Major compute capabilities that the kernels are written for; None: all. Other targets are
        left out of a build.
    """

    module: ClassVar[str]
    supported_major_versions: ClassVar[tuple[int, ...] | None] = None

    @property
    def majors(self) -> tuple[int, ...] | None:
        """`supported_major_versions`, for this specialisation."""
        return self.supported_major_versions

    @property
    def uri(self) -> str:
        """Name of the specialised module: ``norm_op_rmsnorm_dtype_bf16_...``."""
        parts = [self.module]
        for name, value in self._fields():
            parts += [name, short_name(value) if _is_dtype(value) else _token(name, value)]
        uri = re.sub(r"[^\w.-]", "_", "_".join(parts))
        if len(uri) > _MAX_URI:
            hashed = hashlib.sha256(repr(self._fields()).encode()).hexdigest()[:16]
            uri = f"{uri[:_MAX_URI]}_{hashed}"
        return uri

    @property
    def defines(self) -> dict[str, str]:
        """Macro name to token: ``FLASHINFER_CFG_DTYPE`` to ``bfloat16``."""
        return {f"FLASHINFER_CFG_{name.upper()}": _token(name, v) for name, v in self._fields()}

    @property
    def define_flags(self) -> list[str]:
        """The defines as ``-D`` flags, the same for nvcc and the host compiler."""
        return [f"-D{name}={token}" for name, token in self.defines.items()]

    def _fields(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]


def _is_dtype(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def _token(name: str, value: Any) -> str:
    """The value as one C++ token: torch name, 0/1, digits or the bare word."""
    if _is_dtype(value):
        return torch_name(value)
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and re.fullmatch(r"\w+", value):
        return value
    raise TypeError(
        f"{name} of a module configuration must be a torch.dtype, bool, int, enum or a str of "
        f"letters, digits and '_', got {value!r}"
    )
