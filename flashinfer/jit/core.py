"""`JitSpec`: a module that is compiled when it is first needed, and the list of all described.

`spec.py` says what a module is, `store.py` finds and loads it, `builder.py` compiles it; this file
has their faces.
"""

from __future__ import annotations

import atexit
import datetime
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compilation_context import (
    NO_ARCH_MESSAGE,
    CompilationContext,
    current_compilation_context,
)
from . import builder, cache, places, store
from . import env as jit_env
from .config import ModuleConfig
from .cpp_ext import generate_ninja_build_for_op as generate_ninja_build_for_op
from .cpp_ext import get_nvcc_parallelism_flags as get_nvcc_parallelism_flags
from .cpp_ext import run_ninja as run_ninja
from .errors import BuildError, JitError, MissingJITCacheError, ToolchainError
from .files import write_if_different
from .log import FlashInferJITLogger, logger
from .publish import clear_cache_dir
from .spec import ModuleSpec

__all__ = [
    "BuildError",
    "CompilationContext",
    "FlashInferJITLogger",
    "JitError",
    "JitSpec",
    "JitSpecNvcc",
    "JitSpecRegistry",
    "JitSpecStatus",
    "MissingJITCacheError",
    "ToolchainError",
    "build_jit_specs",
    "check_cuda_arch",
    "clear_cache_dir",
    "current_compilation_context",
    "gen_jit_spec",
    "get_tmpdir",
    "jit_spec_registry",
    "logger",
    "write_if_different",
]


# Targets for `extra_cuda_cflags`, under FlashInfer's names. No flag is common to all modules there.
common_nvcc_flags: list[str] = []
sm89_nvcc_flags = ["-gencode=arch=compute_89,code=sm_89", *common_nvcc_flags]
sm90a_nvcc_flags = ["-gencode=arch=compute_90a,code=sm_90a", *common_nvcc_flags]

_MAX_ATTEMPTS = 10  # to load a module while others clear or damage the cache


class JitSpec(ModuleSpec):
    """What a module is compiled from, and the ways to get hold of the compiled module.

    Create one with :func:`gen_jit_spec` or :meth:`from_config`; `ModuleSpec` lists the attributes.
    """

    @classmethod
    def from_config(
        cls, config: ModuleConfig, sources: Sequence[str | Path], **options: Any
    ) -> JitSpec:
        """A module specialised by a configuration: named by its URI, compiled with its defines.

        Parameters
        ----------
        config : ModuleConfig
            The specialisation.
        sources : sequence of path
            Sources; a bare file name is looked for in the package's ``csrc``.
        **options
            As for :func:`gen_jit_spec`, but fast math is off unless it is asked for.
        """
        options.setdefault("use_fast_math", False)
        csrc = jit_env.FLASHINFER_CSRC_DIR
        return gen_jit_spec(config.uri, [csrc / s for s in sources], config=config, **options)

    def write_ninja(self) -> Path:
        """Write ``build.ninja`` into the module's cache folder, for inspection.

        Returns
        -------
        Path
            The file. A build writes its own, next to the library.
        """
        path = places.jit_dir(places.writable_base()) / self.name / "build.ninja"
        write_if_different(path, self.recipe().text())
        return path

    def get_compile_commands(self) -> list[dict[str, str]]:
        """Entries for ``compile_commands.json``, one per source."""
        return self.ninja_module().compile_commands(places.jit_dir() / self.name)

    def build(self, verbose: bool | None = None) -> None:
        """Compile the module, unless it is there already.

        Parameters
        ----------
        verbose : bool, optional
            Log each command and its output; by default as ``FLASHINFER_JIT_VERBOSE`` says.

        Raises
        ------
        BuildError
            If a compiler fails; the message ends with the first error and a hint.
        ToolchainError
            If nvcc, the host compiler or ninja is missing.
        MissingJITCacheError
            If the module is missing and ``FLASHINFER_DISABLE_JIT`` is set.
        """
        build_jit_specs([self], verbose)

    def find(self, prebuilt: bool = True) -> cache.Entry | None:
        """The compiled module on disk: in the cache or, if `prebuilt`, among those shipped.

        A module that is damaged counts as missing.
        """
        return store.find(self, prebuilt)

    def is_built(self) -> bool:
        """Whether the compiled module is on disk."""
        return self.find() is not None

    def get_library_path(self) -> Path:
        """Path of the library: where it is, or where a build would put it."""
        return store.library_path(self)

    @property
    def aot_path(self) -> Path:
        """Path of the library among prebuilt modules, whether it is there or not."""
        entry = self.find()
        if entry is not None and any(map(entry.library.is_relative_to, places.prebuilt_roots())):
            return entry.library
        root = next(iter(places.prebuilt_roots()), places.writable_base())
        return root / self.name / f"{self.name}.so"

    def get_library_paths(self) -> tuple[Path, ...]:
        """The library, as the only element."""
        return (self.get_library_path(),)

    def try_load(self) -> Any | None:
        """The loaded module if it is compiled already, else None. Never compiles."""
        for verify in (False, True):  # as in `build_and_load`
            entry = store.find(self, verify=verify)
            if entry is None:
                break
            if (module := store.load_entry(self, entry)) is not None:
                return module
        return None

    def load(self, so_path: Path | None = None) -> Any:
        """Load the compiled module.

        Parameters
        ----------
        so_path : Path, optional
            Library to load; found in the cache by default.

        Returns
        -------
        tvm_ffi.Module
            Its exported functions are attributes.

        Raises
        ------
        JitError
            If there is no compiled module, or the system cannot load it.
        """
        return store.load(self, Path(so_path) if so_path else self.get_library_path())

    def build_and_load(self) -> Any:
        """The loaded module, compiled first if need be. Callers normally use this.

        Returns
        -------
        tvm_ffi.Module
            Its exported functions are attributes.

        Raises
        ------
        BuildError, ToolchainError, MissingJITCacheError
            As :meth:`build`.
        UntrustedError
            If somebody else can have written the compiled module.
        JitError
            If the system cannot load the module.
        """
        for attempt in range(_MAX_ATTEMPTS):
            # Loading hashes what it loads. Only if that differs must the search hash too, to
            # pass over the damaged module.
            entry = store.find(self, verify=attempt > 0)
            if entry is None:
                self.build()
            elif (module := store.load_entry(self, entry)) is not None:
                return module
        raise JitError(
            f"{self.name} was removed or damaged {_MAX_ATTEMPTS} times while it was loaded.\n"
            f"  hint: look what removes or changes files in {places.jit_dir()}"
        )


JitSpecNvcc = JitSpec
"""FlashInfer's name for a module that nvcc compiles; NVRTC compiles the same ones here."""


def get_tmpdir() -> Path:
    """A new folder for files of this process, removed when it ends."""
    folder = tempfile.mkdtemp(prefix="flashinfer_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@dataclass(frozen=True)
class JitSpecStatus:
    """State of one module.

    Attributes
    ----------
    name : str
        Name of the module.
    created_at : datetime
        When this process described it.
    is_compiled : bool
        Whether it is on disk.
    library_path : Path or None
        Where, if so.
    sources : list of Path
        The files that it is compiled from.
    needs_device_linking : bool
        Whether device code is linked.
    """

    name: str
    created_at: datetime.datetime
    is_compiled: bool
    library_path: Path | None
    sources: list[Path]
    needs_device_linking: bool


class JitSpecRegistry:
    """The modules described in this process."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[JitSpec, datetime.datetime]] = {}

    def register(self, spec: JitSpec) -> None:
        """Take note of a module; the latest of a name counts."""
        self._specs[spec.name] = (spec, datetime.datetime.now())

    def get_all_specs(self) -> dict[str, JitSpec]:
        """Every module by name."""
        return {name: spec for name, (spec, _) in self._specs.items()}

    def get_spec_status(self, name: str) -> JitSpecStatus | None:
        """State of a module, or None if it is not known."""
        if name not in self._specs:
            return None
        spec, created = self._specs[name]
        entry = store.find(spec, verify=False)
        return JitSpecStatus(
            name=name,
            created_at=created,
            is_compiled=entry is not None,
            library_path=entry.library if entry else None,
            sources=list(spec.sources),
            needs_device_linking=spec.needs_device_linking,
        )

    def get_all_statuses(self) -> list[JitSpecStatus]:
        """State of every module."""
        statuses = map(self.get_spec_status, list(self._specs))
        return [status for status in statuses if status is not None]

    def get_stats(self) -> dict[str, int]:
        """Numbers of modules: ``total``, ``compiled``, ``not_compiled``."""
        compiled = sum(status.is_compiled for status in self.get_all_statuses())
        total = len(self._specs)
        return {"total": total, "compiled": compiled, "not_compiled": total - compiled}


jit_spec_registry = JitSpecRegistry()


def gen_jit_spec(
    name: str,
    sources: Sequence[str | Path],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str | Path] | None = None,
    needs_device_linking: bool = False,
    post_load_adapter: Callable[[Any], Any] | None = None,
    embedded_cubin_factory: None = None,
    use_fast_math: bool = True,
    extra_cuda_cflags_by_source: Mapping[str | Path, Sequence[str]] | None = None,
    *,
    config: ModuleConfig | None = None,
) -> JitSpec:
    """Describe a module and register it; nothing is compiled yet.

    Parameters
    ----------
    name : str
        Unique name: letters, digits, ``_``, ``-``, ``.``.
    sources : sequence of path
        ``.cu`` for nvcc, ``.cc``/``.cpp`` for the host compiler.
    extra_cflags, extra_cuda_cflags, extra_ldflags : sequence of str, optional
        More flags for the host compiler, nvcc, the linker. A ``-gencode`` among the nvcc flags
        (see :meth:`CompilationContext.get_nvcc_flags_list`) replaces the default targets.
    extra_include_paths : sequence of path, optional
        Search path after the package's own headers. Headers found there count for the identity.
    needs_device_linking : bool
        Compile relocatable device code and link it.
    post_load_adapter : callable, optional
        Applied to the loaded module; what it returns is what loading returns.
    embedded_cubin_factory : None
        Compiled kernels within a module are not supported.
    use_fast_math : bool
        Pass ``-use_fast_math``. The default is FlashInfer's, for operations that users write; the
        modules of this package pass False.
    extra_cuda_cflags_by_source : mapping, optional
        More nvcc flags for single sources.
    config : ModuleConfig, optional
        Specialisation, passed as ``-D`` flags to both compilers.

    Returns
    -------
    JitSpec

    Raises
    ------
    ValueError
        If the name or a source is not acceptable.
    """
    if embedded_cubin_factory is not None:
        raise ValueError(
            "`embedded_cubin_factory` must be None: it is not supported, got "
            f"{type(embedded_cubin_factory).__name__}"
        )
    spec = JitSpec(
        name,
        sources,
        extra_cflags,
        extra_cuda_cflags,
        extra_ldflags,
        extra_include_paths,
        needs_device_linking,
        post_load_adapter=post_load_adapter,
        use_fast_math=use_fast_math,
        extra_cuda_cflags_by_source=extra_cuda_cflags_by_source,
        config=config,
    )
    jit_spec_registry.register(spec)
    return spec


def build_jit_specs(
    specs: Sequence[JitSpec], verbose: bool | None = None, skip_prebuilt: bool = True
) -> None:
    """Compile several modules in parallel; those that are there already are left alone.

    Parameters
    ----------
    specs : sequence of JitSpec
        The modules.
    verbose : bool, optional
        As in :meth:`JitSpec.build`.
    skip_prebuilt : bool
        Leave alone what is available prebuilt; False compiles it into the cache all the same.

    Raises
    ------
    BuildError
        If some module fails; the others are built and published nevertheless.
    """
    builder.build(specs, verbose, skip_prebuilt)


def check_cuda_arch() -> None:
    """Raise unless there is a target of compute capability 7.5 or later.

    Raises
    ------
    RuntimeError
        If there is no target, or one is too old.
    """
    archs = current_compilation_context.TARGET_CUDA_ARCHS
    if not archs:
        raise RuntimeError(NO_ARCH_MESSAGE)
    old = sorted(f"{a}.{b}" for a, b in archs if (a, int(b.rstrip("af"))) < (7, 5))
    if old:
        raise RuntimeError(f"FlashInfer needs compute capability 7.5 or later, got {old}")


def refresh_current_compilation_context() -> CompilationContext:
    """Forget assigned targets: from now on they are those of the environment again."""
    current_compilation_context.reset()
    return current_compilation_context
