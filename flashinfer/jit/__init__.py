"""Just-in-time compilation: describe a module, find it in the cache or compile it, load it."""

from .core import (
    BuildError,
    CompilationContext,
    FlashInferJITLogger,
    JitError,
    JitSpec,
    MissingJITCacheError,
    ToolchainError,
    build_jit_specs,
    check_cuda_arch,
    clear_cache_dir,
    current_compilation_context,
    gen_jit_spec,
    logger,
    write_if_different,
)
from .registry import (
    JitSpecRegistry,
    JitSpecStatus,
    jit_spec_registry,
    register_generator,
)

__all__ = [
    "BuildError",
    "CompilationContext",
    "FlashInferJITLogger",
    "JitError",
    "JitSpec",
    "JitSpecRegistry",
    "JitSpecStatus",
    "MissingJITCacheError",
    "ToolchainError",
    "build_jit_specs",
    "check_cuda_arch",
    "clear_cache_dir",
    "current_compilation_context",
    "gen_jit_spec",
    "jit_spec_registry",
    "logger",
    "register_generator",
    "write_if_different",
]
