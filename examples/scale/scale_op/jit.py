"""JIT module of the scale op."""

from collections.abc import Iterator
from pathlib import Path

from flashinfer.jit import JitSpec, gen_jit_spec, register_generator

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

    An op that renders its sources from a template writes them to a folder under
    ``flashinfer.jit.env.FLASHINFER_GEN_SRC_DIR`` and passes those files.
    """
    return gen_jit_spec(
        name=get_scale_uri(dtype_in, dtype_out),
        sources=[HERE / "csrc" / "scale.cu", HERE / "csrc" / "scale_jit_binding.cu"],
        extra_include_paths=[HERE / "include"],
        use_fast_math=False,
    )
