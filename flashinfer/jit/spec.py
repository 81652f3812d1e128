"""What a module is compiled from: sources, flags, and the identity that follows from them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import env
from ..compilation_context import current_compilation_context
from ..version import __version__
from . import cpp_ext, cubins, cute_dsl, fingerprint, nvrtc, toolchain
from . import env as jit_env
from .config import ModuleConfig
from .fingerprint import Identity
from .host_parts import HostPart


class ModuleSpec:
    """Sources, flags and identity of a module. It knows neither the cache nor the builder.

    Attributes
    ----------
    name : str
        Unique name (URI), also the file name of the library.
    sources : list of Path
        ``.cu`` files for nvcc, ``.cc``/``.cpp`` files for the host compiler, ``.py`` files for
        CuTe-DSL.
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
        self.post_load_adapter = post_load_adapter
        # Of the same launcher and binding for any user's variant, whose host part serves this too.
        self.host_twin: ModuleSpec | None = None
        self._cuda_cflags_by_source = {
            str(Path(source)): tuple(flags)
            for source, flags in (extra_cuda_cflags_by_source or {}).items()
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def _has_device_code(self) -> bool:
        return bool(self._cuda_sources()) or self.uses_cute_dsl

    @property
    def uses_cute_dsl(self) -> bool:
        """Whether a kernel is written in CuTe-DSL."""
        return bool(self._dsl_sources())

    def uses_cuda(self, external: Sequence[str]) -> bool:
        """Whether a build needs the toolkit: for nvcc, or for headers of the CUDA runtime."""
        return self._has_device_code or any(
            header.startswith(("cuda", "cooperative_groups", "nv/")) for header in external
        )

    def reached(self) -> fingerprint.Reached:
        """The files that the sources reach through ``#include``."""
        flags = self.flags()
        macros = fingerprint.macros_of([*flags.host, *flags.cuda])
        kernels = self._dsl_sources()
        others = [source for source in self.sources if source not in kernels]
        reached = fingerprint.reached_files(others, self.include_dirs(), macros)
        return reached.joined(cute_dsl.reached_files(kernels)) if kernels else reached

    def include_dirs(self) -> list[Path]:
        """Search path of the headers that count for the identity."""
        named = fingerprint.include_flags_of([*self.extra_cflags, *self.extra_cuda_cflags])
        return cpp_ext.own_include_dirs([*self.extra_include_paths, *map(Path, named)])

    def flags(self) -> cpp_ext.Flags:
        """All compiler flags but search paths and the default targets."""
        defines = self.config.define_flags if self.config else []
        flags = cpp_ext.build_flags(
            [*defines, *self.extra_cflags],
            [*defines, *self._granted_header(), *self.extra_cuda_cflags],
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

    def _granted_header(self) -> list[str]:
        """Flags for a `.cu` that counts on its binding to include `tvm_ffi_utils.h` before it.

        FlashInfer's guide has such a one, whose binding includes the header after it.
        """
        if not any(map(fingerprint.takes_tensor_view_for_granted, self._cuda_sources())):
            return []
        return ["-include", str(jit_env.FLASHINFER_CSRC_DIR / "tvm_ffi_utils.h")]

    def _cuda_flags_with_targets(self, flags: cpp_ext.Flags) -> list[str]:
        """nvcc flags, with the default targets if the module chose none."""
        return cpp_ext.with_targets(flags.cuda, self._majors)

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
        # These folders have too many headers to read, so here alone a path counts.
        words = [*env.FLASHINFER_EXTRA_CFLAGS.get(), *env.FLASHINFER_EXTRA_CUDAFLAGS.get()]
        if folders := fingerprint.include_flags_of(words):
            ingredients["folders of the environment"] = folders
        # nvcc reads these variables by itself; their paths count too.
        own = [variable.get() for variable in (env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS)]
        if self._has_device_code and any(own):
            ingredients["flags of nvcc's own variables"] = own
        content = Identity(
            content=fingerprint.digest(ingredients)[:24],
            archs=archs,
            toolchain="",
            ingredients={**ingredients, "archs": archs, "toolchain": None},
            uses_cuda=self.uses_cuda(reached.external),
        )
        return self.with_toolchain(content) if with_toolchain else content

    def with_toolchain(self, content: Identity) -> Identity:
        """An identity without compilers, completed by those of this machine."""
        compilers = self._compilers(content)
        return dataclasses.replace(
            content,
            toolchain=fingerprint.digest(compilers)[:8] if compilers else "",
            ingredients={**content.ingredients, "toolchain": compilers},
        )

    def _compilers(self, content: Identity) -> dict[str, str] | None:
        """Identity of what compiles or joins the module here, or None if nothing can."""
        if ready := self.prebuilt(content):
            return ready.ingredients()
        if part := self.host_part(content):
            return nvrtc.ingredients(part)
        if env.FLASHINFER_COMPILER.get() == "nvrtc":
            return None
        found = toolchain.ingredients(content.uses_cuda)
        if found is None or not self.uses_cute_dsl:
            return found
        dsl = cute_dsl.find()
        return {**found, "cute-dsl": dsl.version} if dsl else None

    def prebuilt(self, content: Identity | None = None) -> cubins.Prebuilt | None:
        """Host part and cubins, if the module can be joined from them without a compiler."""
        content = content or self.identity(with_toolchain=False)
        return cubins.find(self.name, content.content, content.archs)

    def host_part(self, content: Identity | None = None) -> HostPart | None:
        """Launcher and binding if NVRTC is to compile the module; None leaves it to nvcc."""
        return nvrtc.part_for(*self.host_key(content))

    def host_key(self, content: Identity | None = None) -> tuple[str, str]:
        """Name and content under which a host part is looked up."""
        if self.host_twin is not None:
            return self.host_twin.host_key()
        return self.name, (content or self.identity(with_toolchain=False)).content

    @property
    def fingerprint(self) -> str:
        """The key of the module: content, targets and toolchain."""
        return f"{__version__}-{self.identity().key}"

    def recipe(self) -> cpp_ext.NinjaModule | nvrtc.NvrtcModule | cubins.Prebuilt:
        """How the module is built here: joined, with NVRTC, or with nvcc and a host compiler."""
        content = self.identity(with_toolchain=False)
        if ready := self.prebuilt(content):
            ready.require_whole()
            return ready
        part = self.host_part(content)
        if part is None:
            return self.ninja_module()
        part.library.require_whole()
        return nvrtc.NvrtcModule(
            name=self.name,
            sources=self._cuda_sources(),
            archs=content.archs,
            options=self.nvrtc_options(),
            part=part,
        )

    def _cuda_sources(self) -> list[Path]:
        return [source for source in self.sources if source.suffix in cpp_ext.CUDA_SUFFIXES]

    def _dsl_sources(self) -> list[Path]:
        return [source for source in self.sources if source.suffix in cute_dsl.SUFFIXES]

    def nvrtc_options(self) -> list[str]:
        """The options of NVRTC besides the target.

        Raises
        ------
        ToolchainError
            If one of nvcc's flags has no counterpart.
        """
        flags, _ = fingerprint.split_targets(self.flags().cuda)
        return nvrtc.options(flags, self.include_dirs())

    def ninja_module(self) -> cpp_ext.NinjaModule:
        """The module as nvcc and the host compiler build it."""
        flags = self.flags()
        cuda = self._cuda_flags_with_targets(flags) if self._has_device_code else []
        reached = self.reached()
        uses_cuda = self.uses_cuda(reached.external)
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
            dsl=cute_dsl.require() if self.uses_cute_dsl else None,
        )
