"""``get_*_module()`` of the small families: the modules that their functions call, ready to use."""

from __future__ import annotations

import pytest

from flashinfer.cascade import get_cascade_module
from flashinfer.concat_ops import get_concat_mla_module
from flashinfer.norm import gen_norm_module
from flashinfer.page import get_page_module
from flashinfer.quantization import gen_quantization_module
from flashinfer.rope import get_rope_module

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize(
    ("get", "functions"),
    [
        (get_cascade_module, ["merge_state", "merge_state_in_place"]),
        (get_concat_mla_module, ["concat_mla_k"]),
        (get_page_module, ["append_paged_kv_cache", "get_seq_lens"]),
        (get_rope_module, ["rope"]),
        (lambda: gen_norm_module().build_and_load(), ["norm", "gemma_norm"]),
        (lambda: gen_quantization_module().build_and_load(), ["packbits"]),
    ],
    ids=["cascade", "concat_mla", "page", "rope", "norm", "packbits"],
)
def test_a_loaded_module_has_its_functions(get, functions, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    module = get()
    for name in functions:
        # Without arguments they complain of the first one: they are there, and check.
        with pytest.raises(TypeError, match="missing argument"):
            getattr(module, name)()
