"""Sources of users' operations as FlashInfer's guide has them."""

from __future__ import annotations

import pytest
import torch
from jit_helpers import Project

from flashinfer.jit import gen_jit_spec

LAUNCHER = """
using namespace flashinfer;

void twice(TensorView input, TensorView output) {
  CHECK_INPUT(input);
  CHECK_SHAPE(output, input);
}
"""
BINDING = """
#include "twice.cu"
#include "tvm_ffi_utils.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, twice);
"""


@pytest.mark.compiler
def test_a_launcher_may_leave_the_header_to_its_binding(project: Project):
    """The binding includes the header after the launcher, which names `TensorView` already."""
    project.write("twice.cu", LAUNCHER)
    project.write("twice_jit_binding.cu", BINDING)
    spec = project.spec("twice", ("twice.cu", "twice_jit_binding.cu"))
    with pytest.raises(ValueError, match="input must be a CUDA tensor"):
        spec.build_and_load().run(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        (LAUNCHER, True),
        ('#include "tvm_ffi_utils.h"\n' + LAUNCHER, False),
        ("#include <tvm/ffi/container/tensor.h>\n" + LAUNCHER, False),
        ("void launch(float* x);\n", False),
    ],
    ids=["no header", "ours", "the library's", "no tensor"],
)
def test_the_header_comes_first_only_where_it_is_missing(project: Project, text, granted):
    project.write("twice.cu", text)
    spec = project.spec("twice", ("twice.cu",))
    assert ("-include" in spec.flags().cuda) == granted
    before = spec.identity(with_toolchain=False).content
    project.write("twice.cu", text + "\n")
    assert spec.identity(with_toolchain=False).content != before


def test_options_may_be_positional(project: Project):
    project.write("twice.cu", LAUNCHER)
    sources = [project.root / "twice.cu"]
    adapter = lambda module: module  # noqa: E731
    spec = gen_jit_spec("positional", sources, None, None, None, None, False, adapter, None, False)
    assert spec.post_load_adapter is adapter and "-use_fast_math" not in spec.flags().cuda
    with pytest.raises(ValueError, match="`embedded_cubin_factory` must be None"):
        gen_jit_spec("embedded", sources, embedded_cubin_factory=adapter)
