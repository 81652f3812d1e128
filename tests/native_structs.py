"""NumPy dtypes of plain structs in headers, read from their text: a struct is stated once."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np

INCLUDE = Path(__file__).resolve().parents[1] / "include" / "flashinfer"
SCALARS = {"int32_t": np.int32, "int64_t": np.int64, "float": np.float32, "double": np.float64}


@functools.cache
def struct_dtype(header: str, name: str) -> np.dtype:
    """The dtype of struct `name`, whose fields are scalars, structs of the header, or arrays."""
    text = re.sub(r"//[^\n]*", "", (INCLUDE / header).read_text())
    found = re.search(rf"struct\s+(?:alignas\(\d+\)\s+)?{name}\s*{{(.*?)\n}};", text, flags=re.S)
    assert found, f"{header} has no struct {name}"
    body = re.sub(r"\n  [^\n;=]*\([^;]*?{.*", "", found[1], flags=re.S)  # from the first method on
    fields: list[tuple] = []
    for statement in filter(None, map(str.strip, body.split(";"))):
        type_name, declarators = statement.split(maxsplit=1)
        dtype = SCALARS.get(type_name) or struct_dtype(header, type_name)
        for declarator in declarators.split(","):
            field, _, length = declarator.partition("=")[0].strip().rstrip("]").partition("[")
            fields.append((field, dtype, int(length)) if length else (field, dtype))
    return np.dtype(fields)
