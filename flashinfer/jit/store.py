"""Compiled modules on disk: where one is, whether it can be built here, and loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import env
from . import cache, cute_dsl, nvrtc, places, sealed, toolchain
from .errors import DamagedError, JitError, MissingJITCacheError, ToolchainError
from .spec import ModuleSpec


def find(spec: ModuleSpec, prebuilt: bool = True, verify: bool = True) -> cache.Entry | None:
    """The compiled module: in the cache or, if `prebuilt`, among those shipped.

    Parameters
    ----------
    spec : ModuleSpec
        What it must have been compiled from.
    prebuilt : bool
        Look among the prebuilt modules first.
    verify : bool
        Compare the library with its hash, so that a damaged one counts as missing.

    Raises
    ------
    UntrustedError
        If the module is there, but a stranger can have written it.
    """
    content = spec.identity(with_toolchain=False)
    if prebuilt and (entry := cache.find_prebuilt(spec.name, content, verify)):
        return entry
    if env.FLASHINFER_DISABLE_JIT.get():
        return cache.find_of_any_toolchain(spec.name, content, verify)
    identity = spec.with_toolchain(content)
    if identity.toolchain:
        return cache.find(spec.name, identity, verify)
    return cache.find_of_any_toolchain(spec.name, content, verify)


def library_path(spec: ModuleSpec) -> Path:
    """Path of the library: where it is, or where a build would put it."""
    entry = find(spec)
    if entry is not None:
        return entry.library
    home = places.jit_dir(places.writable_base()) / spec.name
    return home / spec.identity().key / f"{spec.name}.so"


def require_buildable(spec: ModuleSpec) -> None:
    """Raise, with a remedy, if a module cannot be compiled here."""
    content = spec.identity(with_toolchain=False)  # there must be a target
    if spec.prebuilt(content):
        toolchain.require_ninja()
        return
    if env.FLASHINFER_DISABLE_JIT.get():
        raise MissingJITCacheError(
            f"{spec.name} is not in the cache ({places.jit_dir()}) or among the prebuilt "
            "modules, and FLASHINFER_DISABLE_JIT forbids compiling it.\n"
            "  hint: unset FLASHINFER_DISABLE_JIT, or build the module beforehand "
            "(`flashinfer build`, FLASHINFER_AOT_DIR, flashinfer-jit-cache)",
            spec,
        )
    reached = spec.reached()
    toolchain.require_ninja()
    if spec.host_part(content) is not None:
        return
    if spec.uses_cute_dsl:
        cute_dsl.require()
    why = f"{spec.name} is not compiled with NVRTC: {nvrtc.why_not(*spec.host_key(content))}"
    if env.FLASHINFER_COMPILER.get() == "nvrtc":
        raise ToolchainError(
            f"FLASHINFER_COMPILER=nvrtc, but {why}.\n"
            "  hint: unset FLASHINFER_COMPILER, which takes nvcc and a host compiler instead"
        )
    try:
        toolchain.require_host_compiler()  # before nvcc, which cannot even report without it
        if spec.uses_cuda(reached.external):
            toolchain.require_toolkit()
    except ToolchainError as error:
        raise type(error)(f"{error}\n  note: {why}") from error


def load(spec: ModuleSpec, path: Path) -> Any:
    """The module whose library is at `path`, passed through the adapter of its spec.

    Raises
    ------
    JitError
        If there is no compiled module, or the system cannot load it.
    """
    import tvm_ffi  # here, since importing it takes longer than importing this package

    if not path.is_file():
        raise JitError(f"{spec.name} has not been built.\n  hint: call build_and_load()")
    try:
        module = tvm_ffi.load_module(str(path))
    except Exception as error:
        raise JitError(
            f"{path} cannot be loaded: {error}\n  hint: it may be damaged, or come from an "
            "incompatible system; compile the module here"
        ) from error
    return _adapted(spec, module)


def load_entry(spec: ModuleSpec, entry: cache.Entry) -> Any | None:
    """The module of an entry; None if its library is not what its builder published.

    The library need not have been verified. The system gets a copy of the bytes that are hashed
    here, unless it takes none or a debugger shall find the file.

    Raises
    ------
    JitError
        If the system cannot load a library that is what its builder published.
    """
    if not env.FLASHINFER_JIT_DEBUG.get():
        try:
            module = sealed.load(entry.library, str(entry.manifest.get("library_sha256")))
        except DamagedError:
            return None
        if module is not None:
            return _adapted(spec, module)
    return _load_in_place(spec, entry)


def _load_in_place(spec: ModuleSpec, entry: cache.Entry) -> Any | None:
    """As `load_entry`, from the file itself: what changes it meanwhile can end the process."""
    if not cache.is_intact(entry):
        return None
    try:
        module = load(spec, entry.library)
    except JitError:
        if not cache.is_intact(entry):
            return None
        # It may have been missing for a moment, while somebody replaced it: once more.
        module = load(spec, entry.library)
    # What was loaded may have replaced what was verified.
    return module if cache.is_intact(entry) else None


def _adapted(spec: ModuleSpec, module: Any) -> Any:
    return spec.post_load_adapter(module) if spec.post_load_adapter else module
