"""`JitSpec`: a module that is compiled when it is first needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import env
from ..compilation_context import (
    NO_ARCH_MESSAGE,
    CompilationContext,
    current_compilation_context,
)
from ..version import __version__
from . import cache, cpp_ext, fingerprint, toolchain
from . import env as jit_env
from .cache import clear_cache_dir, write_if_different
from .config import ModuleConfig
from .errors import BuildError, JitError, MissingJITCacheError, ToolchainError
from .fingerprint import Identity
from .log import FlashInferJITLogger, logger

__all__ = [
    "BuildError",
    "CompilationContext",
    "FlashInferJITLogger",
    "JitError",
    "JitSpec",
    "MissingJITCacheError",
    "ToolchainError",
    "build_jit_specs",
    "check_cuda_arch",
    "clear_cache_dir",
    "current_compilation_context",
    "gen_jit_spec",
    "logger",
    "write_if_different",
]


class JitSpec:
    """What a module is compiled from, and the ways to get hold of the compiled module.

    Create one with :func:`gen_jit_spec` or :meth:`from_config`.

    Attributes
    ----------
    name : str
        Unique name (URI), also the file name of the library.
    sources : list of Path
        ``.cu`` files for nvcc, ``.cc``/``.cpp`` files for the host compiler.
    extra_cflags, extra_cuda_cflags, extra_ldflags : list of str
        Flags on top of the standard ones.
    extra_include_paths : list of Path
        Search path after the package's own headers.
    config : ModuleConfig or None
        The configuration the module was made from.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str | Path],
        extra_cflags: Sequence[str] | None = None,
        extra_cuda_cflags: Sequence[str] | None = None,
        extra_ldflags: Sequence[str] | None = None,
        extra_include_paths: Sequence[str | Path] | None = None,
        needs_device_linking: bool = False,
        *,
        post_load_adapter: Callable[[Any], Any] | None = None,
        use_fast_math: bool = False,
        extra_cuda_cflags_by_source: Mapping[str | Path, Sequence[str]] | None = None,
        config: ModuleConfig | None = None,
    ) -> None:
        self.name = cpp_ext.checked_name(name)
        self.sources = [cpp_ext.checked_source(name, source) for source in sources]
        if not self.sources:
            raise ValueError(f"sources of module {name!r} is empty: at least one file is needed")
        self.extra_cflags = list(extra_cflags or ())
        self.extra_cuda_cflags = list(extra_cuda_cflags or ())
        self.extra_ldflags = list(extra_ldflags or ())
        # Absolute: compilers run in the folder of the build.
        self.extra_include_paths = [Path(path).absolute() for path in extra_include_paths or ()]
        self.needs_device_linking = needs_device_linking
        self.use_fast_math = use_fast_math
        self.config = config
        self._post_load_adapter = post_load_adapter
        self._cuda_cflags_by_source = {
            str(Path(source)): tuple(flags)
            for source, flags in (extra_cuda_cflags_by_source or {}).items()
        }

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

    def __repr__(self) -> str:
        return f"JitSpec({self.name!r})"

    # --- What it is ---------------------------------------------------------------------------

    @property
    def _has_device_code(self) -> bool:
        return any(source.suffix in cpp_ext.CUDA_SUFFIXES for source in self.sources)

    def _uses_cuda(self, external: Sequence[str]) -> bool:
        """Whether a build needs the toolkit: for nvcc, or for headers of the CUDA runtime."""
        return self._has_device_code or any(
            header.startswith(("cuda", "cooperative_groups", "nv/")) for header in external
        )

    def reached(self) -> fingerprint.Reached:
        """The files that the sources reach through ``#include``."""
        flags = self.flags()
        macros = fingerprint.macros_of([*flags.host, *flags.cuda])
        return fingerprint.reached_files(self.sources, self.include_dirs(), macros)

    def include_dirs(self) -> list[Path]:
        """Search path of the headers that count for the identity."""
        named = fingerprint.include_flags_of([*self.extra_cflags, *self.extra_cuda_cflags])
        return cpp_ext.own_include_dirs([*self.extra_include_paths, *map(Path, named)])

    def flags(self) -> cpp_ext.Flags:
        """All compiler flags but search paths and the default targets."""
        defines = self.config.define_flags if self.config else []
        flags = cpp_ext.build_flags(
            [*defines, *self.extra_cflags],
            [*defines, *self.extra_cuda_cflags],
            self.extra_ldflags,
            self.use_fast_math,
        )
        return cpp_ext.Flags(
            flags.host,
            flags.cuda,
            flags.link,
            self._cuda_cflags_by_source,
            self.needs_device_linking,
        )

    def _cuda_flags_with_targets(self, flags: cpp_ext.Flags) -> list[str]:
        """nvcc flags, with the default targets if the module chose none."""
        _, chosen = fingerprint.split_targets(flags.cuda)
        if chosen:
            return list(flags.cuda)
        return [*flags.cuda, *current_compilation_context.get_nvcc_flags_list(self._majors)]

    @property
    def _majors(self) -> list[int] | None:
        majors = self.config.majors if self.config else None
        return None if majors is None else list(majors)

    def has_target(self) -> bool:
        """Whether any of the current targets, if there are any, is one the kernels support."""
        majors = self._majors
        if majors is None:
            return True
        archs = current_compilation_context.TARGET_CUDA_ARCHS
        return not archs or any(major in majors for major, _ in archs)

    def identity(self, with_toolchain: bool = True) -> Identity:
        """What the compiled module must have been built from, as of now.

        Parameters
        ----------
        with_toolchain : bool
            False leaves the compilers out, and does not look for any.

        Raises
        ------
        RuntimeError
            If it has device code and there is no target to compile it for.
        """
        flags = self.flags()
        reached = self.reached()
        cuda = self._cuda_flags_with_targets(flags) if self._has_device_code else []
        cuda, archs = fingerprint.split_targets(cuda)
        sources = [str(source) for source in self.sources]
        ingredients = {
            "name": self.name,
            "files": reached.files,
            "host flags": fingerprint.without_paths(flags.host),
            "cuda flags": fingerprint.without_paths(cuda),
            "link flags": fingerprint.without_paths(flags.link),
            "flags by source": {
                str(sources.index(source)): fingerprint.without_paths(more)
                for source, more in flags.cuda_by_source.items()
                if source in sources
            },
            "device link": flags.device_link,
            "abi": fingerprint.system_abi(),
        }
        # Whose headers are too many to read, and so the one place where a path counts.
        words = [*env.FLASHINFER_EXTRA_CFLAGS.get(), *env.FLASHINFER_EXTRA_CUDAFLAGS.get()]
        if folders := fingerprint.include_flags_of(words):
            ingredients["folders of the environment"] = folders
        # What nvcc reads behind our back, paths and all.
        own = [variable.get() for variable in (env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS)]
        if self._has_device_code and any(own):
            ingredients["flags of nvcc's own variables"] = own
        uses_cuda = self._uses_cuda(reached.external)
        compilers = toolchain.ingredients(uses_cuda) if with_toolchain else None
        return Identity(
            content=fingerprint.digest(ingredients)[:24],
            archs=archs,
            toolchain=fingerprint.digest(compilers)[:8] if compilers else "",
            ingredients={**ingredients, "archs": archs, "toolchain": compilers},
        )

    @property
    def fingerprint(self) -> str:
        """The key of the module: content, targets and toolchain."""
        return f"{__version__}-{self.identity().key}"

    def get_library_paths(self) -> tuple[Path, ...]:
        """The library, as the only element."""
        return (self.get_library_path(),)

    # --- Building -----------------------------------------------------------------------------

    def require_buildable(self) -> None:
        """Raise, with a remedy, if this module cannot be compiled here."""
        if env.FLASHINFER_DISABLE_JIT.get():
            raise MissingJITCacheError(
                f"{self.name} is not in the cache ({cache.jit_dir()}) or among the prebuilt "
                "modules, and FLASHINFER_DISABLE_JIT forbids compiling it.\n"
                "  hint: unset FLASHINFER_DISABLE_JIT, or build the module beforehand "
                "(`flashinfer build`, FLASHINFER_AOT_DIR, flashinfer-jit-cache)",
                self,
            )
        reached = self.reached()
        self.identity(with_toolchain=False)  # there must be a target
        toolchain.require_ninja()
        toolchain.require_host_compiler()  # before nvcc, which cannot even report without it
        if self._uses_cuda(reached.external):
            toolchain.require_toolkit()

    def ninja_module(self) -> cpp_ext.NinjaModule:
        """The module as the ninja generator wants it."""
        flags = self.flags()
        cuda = self._cuda_flags_with_targets(flags) if self._has_device_code else []
        reached = self.reached()
        uses_cuda = self._uses_cuda(reached.external)
        # A source that another one includes is compiled there; twice would define it twice.
        compiled = [s for s in self.sources if os.path.abspath(s) not in reached.included_sources]
        return cpp_ext.NinjaModule(
            name=self.name,
            sources=compiled,
            flags=cpp_ext.Flags(
                flags.host, tuple(cuda), flags.link, flags.cuda_by_source, flags.device_link
            ),
            include_dirs=self.include_dirs(),
            toolkit=toolchain.require_toolkit() if uses_cuda else None,
            host_compiler=toolchain.require_host_compiler(),
        )

    def write_ninja(self) -> Path:
        """Write ``build.ninja`` into the module's cache folder, for inspection.

        Returns
        -------
        Path
            The file. A build writes its own, next to the library.
        """
        path = cache.jit_dir(cache.writable_base()) / self.name / "build.ninja"
        write_if_different(path, self.ninja_module().text())
        return path

    def get_compile_commands(self) -> list[dict[str, str]]:
        """Entries for ``compile_commands.json``, one per source."""
        return self.ninja_module().compile_commands(cache.jit_dir() / self.name)

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

    # --- Loading ------------------------------------------------------------------------------

    def find(self, prebuilt: bool = True) -> cache.Entry | None:
        """The compiled module on disk: in the cache or, if `prebuilt`, among those shipped."""
        content = self.identity(with_toolchain=False)
        if prebuilt and (entry := cache.find_prebuilt(self.name, content)):
            return entry
        if env.FLASHINFER_DISABLE_JIT.get():
            return cache.find_of_any_toolchain(self.name, content)
        identity = self.identity()
        if identity.toolchain:
            return cache.find(self.name, identity)
        return cache.find_of_any_toolchain(self.name, content)

    def is_built(self) -> bool:
        """Whether the compiled module is on disk."""
        return self.find() is not None

    def get_library_path(self) -> Path:
        """Path of the library: where it is, or where a build would put it."""
        entry = self.find()
        if entry is not None:
            return entry.library
        home = cache.jit_dir(cache.writable_base()) / self.name
        return home / self.identity().key / f"{self.name}.so"

    def try_load(self) -> Any | None:
        """The loaded module if it is compiled already, else None. Never compiles."""
        entry = self.find()
        return self.load(entry.library) if entry else None

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
        import tvm_ffi

        path = Path(so_path) if so_path is not None else self.get_library_path()
        if not path.is_file():
            raise JitError(f"{self.name} has not been built.\n  hint: call build_and_load()")
        try:
            module = tvm_ffi.load_module(str(path))
        except Exception as error:
            raise JitError(
                f"{path} cannot be loaded: {error}\n"
                f"  hint: it may come from an incompatible system; remove {path.parent} and retry"
            ) from error
        return self._post_load_adapter(module) if self._post_load_adapter else module

    def build_and_load(self) -> Any:
        """The loaded module, compiled first if need be. What callers normally use.

        Returns
        -------
        tvm_ffi.Module
            Its exported functions are attributes.
        """
        entry = self.find()
        if entry is None:
            self.build()
            entry = self.find()
            assert entry is not None, self.name
        return self.load(entry.library)


def gen_jit_spec(
    name: str,
    sources: Sequence[str | Path],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str | Path] | None = None,
    needs_device_linking: bool = False,
    *,
    post_load_adapter: Callable[[Any], Any] | None = None,
    use_fast_math: bool = True,
    extra_cuda_cflags_by_source: Mapping[str | Path, Sequence[str]] | None = None,
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
    use_fast_math : bool
        Pass ``-use_fast_math``.
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
    from .registry import jit_spec_registry

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
    from . import builder

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
