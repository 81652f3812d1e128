"""JIT module of the scale op."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flashinfer.jit import JitSpec, gen_jit_spec, register_generator
from flashinfer.jit import env as jit_env

HERE = Path(__file__).resolve().parent.parent
DTYPES = ("float32", "float16", "bfloat16")


def get_scale_uri(dtype_in: str, dtype_out: str) -> str:
    """Name of the module, unique for its parameters."""
    return f"scale_dtype_in_{dtype_in}_dtype_out_{dtype_out}"


def _aot_cases() -> Iterator[tuple[str, str]]:
    return ((dtype, dtype) for dtype in DTYPES)


@register_generator(aot=_aot_cases)
def gen_scale_module(dtype_in: str, dtype_out: str) -> JitSpec:
    """Describe the module; nothing is compiled yet.

    The sources are copied to the folder for generated code, as an op that renders a template
    would do. An op that does not may as well pass the files where they are.
    """
    uri = get_scale_uri(dtype_in, dtype_out)
    gen_directory = jit_env.FLASHINFER_GEN_SRC_DIR / uri
    os.makedirs(gen_directory, exist_ok=True)
    sources = []
    for fname in ["scale.cu", "scale_jit_binding.cu"]:
        dest_path = gen_directory / fname
        shutil.copy(HERE / "csrc" / fname, dest_path)
        sources.append(dest_path)
    return gen_jit_spec(
        name=uri,
        sources=sources,
        extra_cuda_cflags=[],
        extra_include_paths=[HERE / "include"],
        use_fast_math=False,
    )
