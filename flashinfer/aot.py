"""Building modules ahead of time, for machines that shall not compile.

    python -m flashinfer.aot --out-dir DIR        then there: FLASHINFER_AOT_DIR=DIR

The folder holds one sub-folder per module, laid out as in the cache. It may be moved. What is in
it comes from the registered generators; there is no list of modules here. Modules that the wheel
flashinfer-jit-cache or an earlier folder has, of the same sources and targets, are copied from
there and not compiled again. `gen_all_modules` and its like describe a selection by FlashInfer's
options, for `compile_and_package_modules`.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .compilation_context import current_compilation_context
from .jit import places, registry
from .jit.attention import (
    AttentionConfig,
    choose_tile_q,
    gen_attention_module,
    gen_batch_decode_module,
    gen_batch_prefill_attention_sink_module,
    gen_batch_prefill_module,
    gen_single_decode_module,
    gen_single_prefill_module,
)
from .jit.attention.config import tile_head_dim
from .jit.cache import read_entry
from .jit.core import JitError, JitSpec, build_jit_specs, check_cuda_arch


def select_modules(preset: str | None = None, patterns: Sequence[str] = ()) -> list[JitSpec]:
    """Modules to build for the current targets.

    Parameters
    ----------
    preset : str, optional
        A named set; by default the AOT cases of every generator.
    patterns : sequence of str
        Shell patterns of module names; one of them must match. Empty takes all.

    Raises
    ------
    ValueError
        If the preset does not exist or nothing matches.
    """
    specs = registry.preset_specs(preset) if preset else registry.aot_specs()
    if patterns:
        specs = [s for s in specs if any(fnmatch.fnmatchcase(s.name, p) for p in patterns)]
    if not specs:
        raise ValueError(f"no module matches preset {preset!r} and patterns {list(patterns)!r}")
    return specs


def detect_sm_capabilities() -> dict[str, bool]:
    """Whether modules are compiled for an architecture, by ``"sm75"`` to ``"sm121"``."""
    targets = {
        f"sm{major}{minor.rstrip('af')}"
        for major, minor in current_compilation_context.TARGET_CUDA_ARCHS
    }
    known = (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)
    return {f"sm{number}": f"sm{number}" in targets for number in known}


def parse_bool(s: str) -> bool:
    """A word of a command line: ``true`` or ``1``, ``false`` or ``0``, in any case.

    Raises
    ------
    ValueError
        If it is another.
    """
    words = {"true": True, "1": True, "false": False, "0": False}
    if s.lower() not in words:
        raise ValueError(f"`s` must be true, 1, false or 0, got {s!r}")
    return words[s.lower()]


def parse_head_dim(head_dim: str) -> tuple[int, int]:
    """Head sizes of a command line, ``"192,128"``: those of queries and of values.

    Raises
    ------
    ValueError
        If these are not two integers with a comma between.
    """
    parts = head_dim.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"`head_dim` must be two sizes such as '128,128', got {head_dim!r}")
    return int(parts[0]), int(parts[1])


def register_default_modules() -> int:
    """Describe the AOT cases of every registered generator to `jit_spec_registry`; their number.

    Generators count that `register_generator` marks. A function named ``gen_..._modules`` is not
    looked for: mark the generator of each module.
    """
    return len(registry.aot_specs())


# --- Modules by FlashInfer's options ------------------------------------------------------------

_SWITCHES = ("add_comm", "add_gemma", "add_oai_oss", "add_moe", "add_act", "add_misc", "add_xqa")
# Which of them asks for the generators of a file in flashinfer/jit; by default "misc" does.
_FAMILIES = {"comm": "comm", "moe": "moe", "weight_gemm": "moe", "activation": "act"}


def get_default_config() -> dict[str, Any]:
    """The options of `gen_all_modules` that serve most models, by FlashInfer's names.

    Returns
    -------
    dict
        Lists of dtypes (``"f16_dtype"``, ``"f8_dtype"``), of pairs of head sizes
        (``"fa2_head_dim"``, ``"fa3_head_dim"``) and of bools (``"use_sliding_window"``,
        ``"use_logits_soft_cap"``), and the bools from ``"add_comm"`` to ``"add_xqa"``.
    """
    return {
        "f16_dtype": [torch.float16, torch.bfloat16],
        "f8_dtype": [torch.float8_e4m3fn],
        "fa2_head_dim": [(64, 64), (128, 128), (256, 256)],
        "fa3_head_dim": [(192, 128), (128, 128), (64, 64), (256, 256)],
        "use_sliding_window": [False],
        "use_logits_soft_cap": [False],
        **dict.fromkeys(_SWITCHES, True),
    }


def gen_fa2(
    dtype_qo: torch.dtype,
    dtype_kv: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    prefill_only: bool = False,
) -> Iterator[JitSpec]:
    """The modules of the portable attention kernel for one model: long causal prompts, and decode.

    Parameters
    ----------
    dtype_qo, dtype_kv : torch.dtype
        Types of queries and outputs, and of keys and values.
    head_dim_qk, head_dim_vo : int
        Head sizes of queries and keys, and of values and outputs.
    use_sliding_window, use_logits_soft_cap : bool
        Whether the options are compiled in.
    prefill_only : bool
        Whether to leave out decode.

    Yields
    ------
    JitSpec
        The modules of one request without pages, and those of a batch over pages.

    Raises
    ------
    ValueError
        If there is no kernel for an argument.
    """
    q, kv, qk, vo = dtype_qo, dtype_kv, head_dim_qk, head_dim_vo
    window, cap = use_sliding_window, use_logits_soft_cap
    yield gen_single_prefill_module("fa2", q, kv, q, qk, vo, 0, window, cap, False)
    yield gen_batch_prefill_module("fa2", q, kv, q, torch.int32, qk, vo, 0, window, cap, False)
    if not prefill_only:
        yield gen_single_decode_module(q, kv, q, qk, vo, 0, window, cap)
        yield gen_batch_decode_module(q, kv, q, torch.int32, qk, vo, 0, window, cap)


def gen_fa3(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> Iterator[JitSpec]:
    """The modules of Hopper's attention kernel for the prompts of one model.

    Parameters
    ----------
    dtype_q, dtype_kv, dtype_o : torch.dtype
        Types of queries, of keys and values, and of outputs.
    head_dim_qk, head_dim_vo, use_sliding_window, use_logits_soft_cap
        As for `gen_fa2`, as are the modules and the errors.
    """
    q, kv, o, qk, vo = dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo
    window, cap = use_sliding_window, use_logits_soft_cap
    yield gen_single_prefill_module("fa3", q, kv, o, qk, vo, 0, window, cap, False)
    yield gen_batch_prefill_module("fa3", q, kv, o, torch.int32, qk, vo, 0, window, cap, False)


def gen_attention(
    f16_dtype_: Sequence[torch.dtype],
    f8_dtype_: Sequence[torch.dtype],
    fa2_head_dim_: Sequence[tuple[int, int]],
    fa3_head_dim_: Sequence[tuple[int, int]],
    use_sliding_window_: Sequence[bool],
    use_logits_soft_cap_: Sequence[bool],
    has_sm90: bool,
    has_sm100: bool,
    has_sm103: bool,
    has_sm110: bool,
    add_gemma: bool,
    add_oai_oss: bool,
) -> Iterator[JitSpec]:
    """The attention modules of all combinations of options.

    Parameters
    ----------
    f16_dtype_ : sequence of torch.dtype
        Types of queries and outputs; keys and values have the same or one of `f8_dtype_`.
    f8_dtype_ : sequence of torch.dtype
        8-bit types of keys and values.
    fa2_head_dim_, fa3_head_dim_ : sequence of (int, int)
        Head sizes (queries and keys, values) for the portable kernel and for Hopper's.
    use_sliding_window_, use_logits_soft_cap_ : sequence of bool
        Which values the options take.
    has_sm90 : bool
        Whether to have Hopper's kernel.
    has_sm100, has_sm103, has_sm110 : bool
        Add nothing: Blackwell runs the portable kernel.
    add_gemma : bool
        Add heads of 256 with soft cap, with and without a window.
    add_oai_oss : bool
        Add bfloat16 heads of 64 with sinks, with and without a window.

    Yields
    ------
    JitSpec
        The modules that `gen_fa2` and `gen_fa3` describe; some may repeat.

    Raises
    ------
    ValueError
        If there is no kernel for an element of a list.
    """
    del has_sm100, has_sm103, has_sm110
    types = [(q, kv) for q in f16_dtype_ for kv in (q, *f8_dtype_)]
    options = list(itertools.product(use_sliding_window_, use_logits_soft_cap_))
    for (q, kv), head_dims, option in itertools.product(types, fa2_head_dim_, options):
        yield from gen_fa2(q, kv, *head_dims, *option)
    if has_sm90:
        for (q, kv), head_dims, option in itertools.product(types, fa3_head_dim_, options):
            yield from gen_fa3(q, kv, q, *head_dims, *option)
    windows = (False, True)
    if add_gemma:
        for dtype, window in itertools.product(f16_dtype_, windows):
            yield from gen_fa2(dtype, dtype, 256, 256, window, True)
    if add_oai_oss:
        bf16 = torch.bfloat16
        for backend, window in itertools.product(("fa2", *["fa3"] * has_sm90), windows):
            yield gen_batch_prefill_attention_sink_module(
                backend, bf16, bf16, bf16, torch.int32, 64, 64, 0, window
            )


def gen_xqa(
    input_type_: Sequence[torch.dtype],
    fp8_kv_cache_: Sequence[bool],
    token_per_page_: Sequence[int],
    head_size_: Sequence[int],
    head_grp_size_: Sequence[int],
    use_sliding_window_: Sequence[bool],
    has_sm90: bool,
    has_sm100: bool,
    has_sm103: bool,
    has_sm120: bool,
    has_sm121: bool,
) -> Iterator[JitSpec]:
    """The modules of ``flashinfer.xqa.xqa`` for one query token, for all combinations of options.

    Parameters
    ----------
    input_type_ : sequence of torch.dtype
        Types of queries and outputs.
    fp8_kv_cache_ : sequence of bool
        Whether keys and values are float8_e4m3fn, or of the queries' type.
    token_per_page_ : sequence of int
        Selects nothing: the size of pages is a run-time argument.
    head_size_, head_grp_size_ : sequence of int
        Head sizes, and query heads of a KV head.
    use_sliding_window_ : sequence of bool
        Whether there is a window.
    has_sm90, has_sm100, has_sm103, has_sm120, has_sm121 : bool
        Without one of them there is nothing, as in FlashInfer; the kernel runs on all of them.

    Yields
    ------
    JitSpec
        Some modules may repeat.

    Raises
    ------
    ValueError
        If there is no kernel for an element of a list.
    """
    del token_per_page_
    if not (has_sm90 or has_sm100 or has_sm103 or has_sm120 or has_sm121):
        return
    for dtype, is_fp8, size, group, window in itertools.product(
        input_type_, fp8_kv_cache_, head_size_, head_grp_size_, use_sliding_window_
    ):
        dtype_kv = torch.float8_e4m3fn if is_fp8 else dtype
        tile_q = choose_tile_q(group, group, tile_head_dim(size, size))
        yield gen_attention_module(
            AttentionConfig(dtype, dtype_kv, dtype, size, size, tile_q, sliding_window=window)
        )


def gen_all_modules(
    f16_dtype_: Sequence[torch.dtype],
    f8_dtype_: Sequence[torch.dtype],
    fa2_head_dim_: Sequence[tuple[int, int]],
    fa3_head_dim_: Sequence[tuple[int, int]],
    use_sliding_window_: Sequence[bool],
    use_logits_soft_cap_: Sequence[bool],
    sm_capabilities: Mapping[str, bool],
    add_comm: bool,
    add_gemma: bool,
    add_oai_oss: bool,
    add_moe: bool,
    add_act: bool,
    add_misc: bool,
    add_xqa: bool,
) -> list[JitSpec]:
    """The modules of a selection of families, attention by its options.

    Parameters
    ----------
    f16_dtype_, f8_dtype_, fa2_head_dim_, fa3_head_dim_, use_sliding_window_, \
use_logits_soft_cap_, add_gemma, add_oai_oss
        As for `gen_attention`.
    sm_capabilities : mapping of str to bool
        Targets, as `detect_sm_capabilities` has them. Other families take their targets from
        ``FLASHINFER_CUDA_ARCH_LIST``.
    add_comm, add_moe, add_act, add_misc : bool
        Add the AOT cases of communication; of mixtures of experts; of gated activations; of all
        other families.
    add_xqa : bool
        Add `gen_xqa` of heads of 64, 128 and 256, in groups of 1 to 16.

    Returns
    -------
    list of JitSpec
        Without repetition, and only what exists for the targets.

    Raises
    ------
    ValueError
        If there is no kernel for an element of a list.
    """
    has = [bool(sm_capabilities.get(f"sm{number}")) for number in (90, 100, 103, 120, 121)]
    specs = list(
        gen_attention(
            f16_dtype_,
            f8_dtype_,
            fa2_head_dim_,
            fa3_head_dim_,
            use_sliding_window_,
            use_logits_soft_cap_,
            has[0],
            has[1],
            has[2],
            bool(sm_capabilities.get("sm110")),
            add_gemma,
            add_oai_oss,
        )
    )
    if add_xqa:
        both, sizes, groups = (False, True), (64, 128, 256), (1, 4, 8, 16)
        specs += gen_xqa(f16_dtype_, both, (16,), sizes, groups, both, *has)
    specs += _families({"comm": add_comm, "moe": add_moe, "act": add_act, "misc": add_misc})
    return list({spec.name: spec for spec in specs if spec.has_target()}.values())


def _families(wanted: Mapping[str, bool]) -> Iterator[JitSpec]:
    """The AOT cases of families, and whatever plans of attention need beside its kernels."""
    for generator in registry.generators().values():
        module = generator.function.__module__.removeprefix(f"{registry.__package__}.")
        is_attention = module.startswith("attention.")
        if generator.function is not gen_attention_module and (
            is_attention or wanted[_FAMILIES.get(module, "misc")]
        ):
            yield from generator.specs()


def compile_and_package_modules(
    out_dir: Path | None, specs: Sequence[JitSpec] | None = None, verbose: bool | None = None
) -> None:
    """Compile modules, each if there is none in the cache or prebuilt, and copy them to a folder.

    Parameters
    ----------
    out_dir : Path, optional
        The folder; without one the cache alone is filled.
    specs : sequence of JitSpec, optional
        The modules; by default the AOT cases of every generator.
    verbose : bool, optional
        Log every command.
    """
    check_cuda_arch()
    specs = select_modules() if specs is None else specs
    build_jit_specs(specs, verbose)
    if out_dir is not None:
        copy_built_kernels(specs, out_dir)


def prebuilt_names(specs: Sequence[JitSpec]) -> dict[Path, list[str]]:
    """Which modules a build leaves alone, by the folder of prebuilt modules that has them."""
    found: dict[Path, list[str]] = {}
    for spec in specs:
        entry = spec.find()
        for root in places.prebuilt_roots():
            if entry is not None and entry.library.is_relative_to(root):
                found.setdefault(root, []).append(spec.name)
                break
    return found


def copy_built_kernels(jit_specs: Sequence[JitSpec], out_dir: Path) -> None:
    """Copy compiled modules from where they are to a folder that can serve as `FLASHINFER_AOT_DIR`.

    Earlier builds of the same modules in that folder are removed.

    Raises
    ------
    JitError
        If a module is not compiled.
    """
    for spec in jit_specs:
        entry = spec.find()
        if entry is None:
            raise JitError(f"{spec.name} has not been compiled.\n  hint: build it first")
        home = Path(out_dir) / spec.name
        home.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=home, prefix=".copy-"))
        copied = shutil.copytree(entry.folder, scratch / entry.folder.name)
        for old in home.iterdir():
            if old != scratch:
                shutil.rmtree(old)
        copied.rename(home / entry.folder.name)
        scratch.rmdir()
        assert read_entry(home / entry.folder.name) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer.aot", description=__doc__)
    parser.add_argument("--out-dir", type=Path, help="folder for the compiled modules")
    parser.add_argument("--preset", help="a named set instead of everything")
    parser.add_argument("--list", action="store_true", help="print the modules, build nothing")
    parser.add_argument("--verbose", action="store_true", help="show every command")
    parser.add_argument("patterns", nargs="*", help="shell patterns of module names")
    options = parser.parse_args(arguments)
    if not options.list and options.out_dir is None:
        parser.error("--out-dir is needed (or --list)")
    try:
        specs = select_modules(options.preset, options.patterns)
        if options.list:
            print("\n".join(spec.name for spec in specs))
            return 0
        check_cuda_arch()
        prebuilt = prebuilt_names(specs)
        compile_and_package_modules(options.out_dir, specs, options.verbose or None)
    except (JitError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    targets = sorted(f"{a}.{b}" for a, b in current_compilation_context.TARGET_CUDA_ARCHS)
    print(f"{len(specs)} modules for {', '.join(targets)} in {options.out_dir}")
    for root, names in prebuilt.items():
        print(f"{len(names)} of them were taken from {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
