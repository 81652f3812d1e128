"""Reads back from built libraries which kernels the compilers made."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from flashinfer.jit import JitSpec, jit_spec_registry
from flashinfer.jit.binary import Kernel, read_kernels

from .decode_step import ATTENTION, COMMUNICATION, GEMM, LAYER, RECURRENCE, ROUTING, SAMPLING

_MODULES_OF_PART = {
    ATTENTION: ("attention", "attention_gather", "attention_mask_ranges", "batch_mla", "cascade"),
    RECURRENCE: ("delta_rule", "chunk_delta_rule", "chunk_kda", "selective_state", "ssd"),
    GEMM: (
        *("gemm", "weight_gemm", "one_row", "one_row_heads", "one_row_route", "few_rows"),
        "moe_token",
    ),
    ROUTING: ("moe_route", "moe_map", "moe_combine"),
    LAYER: (
        *("norm", "fused_rmsnorm", "qk_norm_rope", "act_and_mul", "rope", "page", "concat_mla"),
        *("group_quant", "sigmoid_gate"),
    ),
    SAMPLING: ("topk", "sampling"),
    COMMUNICATION: ("all_reduce",),
}
_PART_OF_MODULE = {name: part for part, names in _MODULES_OF_PART.items() for name in names}


def kernels_of(spec: JitSpec) -> dict[tuple[str, str], list[Kernel]]:
    """Kernels of a module, by name and architecture: the instances of each template."""
    spec.build()  # nothing to do, unless a source has been edited meanwhile
    found: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in read_kernels(spec.get_library_path()):
        found.setdefault((kernel.short_name, kernel.arch), []).append(kernel)
    return found


def kernel_table(specs: Sequence[JitSpec]) -> str:
    """Resources of every kernel as text; modules by their number in `specs`, from 1."""
    rows = []
    for number, spec in enumerate(specs, 1):
        for (name, arch), kernels in kernels_of(spec).items():
            registers = sorted({kernel.registers for kernel in kernels})
            stack = max(kernel.stack_bytes for kernel in kernels)
            span = "-".join(map(str, (registers[0], registers[-1])[: len(registers)]))
            rows.append((number, name, len(kernels), arch, span, f"{stack} B" if stack else "none"))
    headers = ["module", "kernel", "instances", "arch", "registers", "stack"]
    table = tabulate(rows, headers, disable_numparse=True)
    if all(row[-1] == "none" for row in rows):
        return table
    return f"{table}\nstack: bytes of a thread, for arrays indexed at run time or spilled registers"


def built_kernel_parts() -> dict[str, str]:
    """`kernel_parts` of what this process has built."""
    specs = jit_spec_registry.get_all_specs().values()
    return kernel_parts([spec for spec in specs if spec.is_built()])


def kernel_parts(specs: Sequence[JitSpec]) -> dict[str, str]:
    """Part of the step that each kernel of built modules belongs to, by the kernel's name."""
    return {
        name: _PART_OF_MODULE[spec.config.module]
        for spec in specs
        for name, _ in kernels_of(spec)
        if spec.config is not None and spec.config.module in _PART_OF_MODULE
    }
