"""A user's attention variant: C++ hooks, and the tensors and scalars that they read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env as jit_env
from ..files import write_if_different

# C++ type of an additional tensor: dtype of the torch.Tensor that it takes.
TENSOR_TYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "__half": "float16",
    "nv_half": "float16",
    "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16",
    "bool": "bool",
    "int8_t": "int8",
    "int16_t": "int16",
    "int32_t": "int32",
    "int": "int32",
    "int64_t": "int64",
    "uint8_t": "uint8",
    "uint16_t": "uint16",
    "uint32_t": "uint32",
    "uint64_t": "uint64",
}
# Members of `params` that a variant must not hide: the kernel or the hooks read them.
RESERVED = (
    *("num_qo_heads", "num_kv_heads", "qo_len", "kv_len", "get_qo_len", "get_kv_len"),
    *("read", "unused_slots"),
)
_WIDTHS = (8, 16, 32, 64)
# Members that a host part has room for: csrc/nvrtc/variant/attention_variant_params.h.
HOST_PART_SLOTS = 16
SCALAR_TYPES = (
    "float",
    "double",
    "bool",
    "int",
    *(f"int{width}_t" for width in _WIDTHS),
    *(f"uint{width}_t" for width in _WIDTHS),
)


@dataclass(frozen=True)
class AttentionVariant:
    """A variant as `jit_args` describe it.

    Attributes
    ----------
    uri : str
        The user's name for it: letters, digits and ``_``.
    tensor_names, tensor_types : tuple of str
        Additional tensors, members of ``params`` in the hooks, and the C++ types of their
        elements (keys of ``TENSOR_TYPES``). Names that begin with ``maybe_`` may be None.
    scalar_names, scalar_types : tuple of str
        Additional scalars and their C++ types (``SCALAR_TYPES``).
    name : str
        Name of the struct in `declaration`.
    declaration : str
        C++ source with the struct, derived from ``AttentionVariantBase``.
    """

    uri: str
    tensor_names: tuple[str, ...]
    tensor_types: tuple[str, ...]
    scalar_names: tuple[str, ...]
    scalar_types: tuple[str, ...]
    name: str
    declaration: str

    def __post_init__(self) -> None:
        _check_name("uri", self.uri, r"\w+")
        _check_name("variant_name", self.name, r"[A-Za-z_]\w*(<[\w\s,:]*>)?")
        if not isinstance(self.declaration, str):
            raise TypeError(f"`variant_decl` must be a str, got {type(self.declaration).__name__}")
        _check_members("additional_tensor", self.tensor_names, self.tensor_types, TENSOR_TYPES)
        _check_members("additional_scalar", self.scalar_names, self.scalar_types, SCALAR_TYPES)
        both = [*self.tensor_names, *self.scalar_names]
        if twice := sorted({name for name in both if both.count(name) > 1}):
            raise ValueError(f"`additional_tensor_names` and scalars name {twice} more than once")

    @property
    def transforms_operands(self) -> bool:
        """Whether hooks change queries or keys before they are multiplied."""
        hook = r"\b(REGISTER_(QUERY|KEY)_TRANSFORM|(Query|Key)Transform)\b"
        return re.search(hook, self.declaration) is not None

    @property
    def has_softmax(self) -> bool:
        """Whether weights are exponentials of logits, not the logits themselves."""
        return re.search(r"\buse_softmax\s*[={]\s*false\b", self.declaration) is None

    @property
    def members(self) -> str:
        """What run() takes after its own arguments: kind, type and name, a line each."""
        tensors = zip(self.tensor_types, self.tensor_names, strict=True)
        scalars = zip(self.scalar_types, self.scalar_names, strict=True)
        lines = [f"tensor {TENSOR_TYPES[type_]} {name}\n" for type_, name in tensors]
        return "".join([*lines, *(f"scalar {type_} {name}\n" for type_, name in scalars)])

    @property
    def has_host_part(self) -> bool:
        """Whether NVRTC can compile it: few members, and of C++ nothing but the language."""
        types = {*self.tensor_types, *self.scalar_types}
        of_cuda = any("half" in text or "bfloat16" in text for text in (*types, self.declaration))
        headers = re.findall(r"#\s*include\s*<(?!flashinfer/|cstdint|cstdio)", self.declaration)
        num_members = len(self.tensor_names) + len(self.scalar_names)
        return not (
            of_cuda or headers or "std::" in self.declaration or num_members > HOST_PART_SLOTS
        )

    def write_headers(self) -> Path:
        """Render the headers, unless they are there. Returns their folder, named by content."""
        texts = {name: self._render(name) for name in ("params.h", "cuh")}
        content = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:16]
        folder = Path(jit_env.FLASHINFER_GEN_SRC_DIR) / f"{self.uri[:60]}_{content}"
        write_if_different(folder / "attention_variant_params.h", texts["params.h"])
        write_if_different(folder / "attention_variant.cuh", texts["cuh"])
        return folder

    def _render(self, kind: str) -> str:
        import jinja2

        stem = "attention_variant_params.h" if kind == "params.h" else "attention_variant.cuh"
        template = (Path(jit_env.FLASHINFER_CSRC_DIR) / f"{stem}.jinja").read_text("utf-8")
        types = {*self.tensor_types, *self.scalar_types}
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        return environment.from_string(template).render(
            variant=self,
            tensors=[
                (name, type_, TENSOR_TYPES[type_])
                for name, type_ in zip(self.tensor_names, self.tensor_types, strict=True)
            ],
            slots=HOST_PART_SLOTS,
            unused_slots=HOST_PART_SLOTS - len(self.tensor_names) - len(self.scalar_names),
            scalars=list(zip(self.scalar_types, self.scalar_names, strict=True)),
            uses_half=any("half" in type_ for type_ in types) or "half" in self.declaration,
            uses_bfloat16=any("bfloat16" in t for t in types) or "bfloat16" in self.declaration,
        )


def make_variant(
    uri: str,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
) -> AttentionVariant:
    """The variant that the arguments of ``gen_customize_*_module`` describe, checked.

    Raises
    ------
    TypeError, ValueError
        Naming the argument that is not as :class:`AttentionVariant` wants it.
    """
    lists = {
        "additional_tensor_names": additional_tensor_names,
        "additional_tensor_dtypes": additional_tensor_dtypes,
        "additional_scalar_names": additional_scalar_names,
        "additional_scalar_dtypes": additional_scalar_dtypes,
    }
    for name, value in lists.items():
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise TypeError(f"`{name}` must be a list of str, got {value!r}")
    return AttentionVariant(
        uri,
        tuple(additional_tensor_names),
        tuple(additional_tensor_dtypes),
        tuple(additional_scalar_names),
        tuple(additional_scalar_dtypes),
        variant_name,
        variant_decl,
    )


def _check_name(argument: str, value: Any, pattern: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{argument}` must be a str, got {type(value).__name__}")
    if not re.fullmatch(pattern, value):
        raise ValueError(f"`{argument}` must be a C++ name, got {value!r}")


def _check_members(argument: str, names: Any, types: Any, allowed: Any) -> None:
    if len(names) != len(types):
        raise ValueError(
            f"`{argument}_names` and `{argument}_dtypes` must be equally long, got {len(names)} "
            f"and {len(types)}"
        )
    for name, type_ in zip(names, types, strict=True):
        _check_name(f"{argument}_names", name, r"[A-Za-z_]\w*")
        if name in RESERVED:
            raise ValueError(f"`{argument}_names` must not have {name!r}: `params` has it already")
        if type_ not in allowed:
            raise ValueError(
                f"`{argument}_dtypes` must be among {', '.join(allowed)}, got {type_!r} for {name}"
            )
