"""Compiler flags and the text of `build.ninja`.

The functions at the end are FlashInfer's, for those who run ninja on files of their own. The
package's modules do not come that way: `JitSpec` names, caches and locks what it builds.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from .. import env
from ..compilation_context import current_compilation_context
from . import cute_dsl, fingerprint, process, toolchain
from . import env as jit_env
from .errors import BuildError

# nvcc starts its parts through a shell, splits folders at commas, and quotes neither well enough.
_AWKWARD_FOR_NVCC = re.compile(r"[,'\"$`\\;&()|<>\n]")
CUDA_SUFFIXES = (".cu",)
HOST_SUFFIXES = (".cc", ".cpp", ".cxx", ".c++")


def checked_name(name: str) -> str:
    """The name of a module, if files can be called so."""
    too_long = len(name.encode(errors="replace")) > 200
    if not name or too_long or not all(c.isalnum() or c in "_-." for c in name):
        raise ValueError(
            "name of a module must be 1 to 200 bytes of letters, digits, '_', '-' or '.', "
            f"got {name!r}"
        )
    if name.startswith("."):
        raise ValueError(f"name of a module must not start with '.', got {name!r}")
    return name


def checked_source(name: str, source: str | Path) -> Path:
    """A source of module `name`, if there is a compiler for it."""
    path = Path(source)
    allowed = CUDA_SUFFIXES + HOST_SUFFIXES + cute_dsl.SUFFIXES
    if path.suffix not in allowed:
        raise ValueError(
            f"sources of module {name!r}: {str(path)!r} must end in one of {', '.join(allowed)}"
        )
    if path.suffix in CUDA_SUFFIXES and (odd := _AWKWARD_FOR_NVCC.search(path.name)):
        raise ValueError(
            f"sources of module {name!r}: nvcc cannot read a file with {odd[0]!r} in its name, "
            f"got {str(path)!r}"
        )
    return path


@dataclass(frozen=True)
class Flags:
    """Everything that is said to the compilers besides search paths.

    Attributes
    ----------
    host, cuda, link : tuple of str
        Flags of the host compiler, of nvcc (targets included) and of the linker.
    cuda_by_source : dict of str to tuple of str
        More nvcc flags for single sources.
    device_link : bool
        Compile relocatable device code and link it.
    """

    host: tuple[str, ...]
    cuda: tuple[str, ...]
    link: tuple[str, ...]
    cuda_by_source: dict[str, tuple[str, ...]] = field(default_factory=dict)
    device_link: bool = False


def build_flags(
    extra_cflags: Sequence[str],
    extra_cuda_cflags: Sequence[str],
    extra_ldflags: Sequence[str],
    use_fast_math: bool,
) -> Flags:
    """The flags of a module: ours, the module's, then those of the environment (last wins)."""
    debug = env.FLASHINFER_JIT_DEBUG.get()
    # Hidden symbols: two modules with the same template instances must not share them.
    host = ["-std=c++17", "-fPIC", "-fvisibility=hidden"]
    host += ["-O0", "-g"] if debug else ["-O2"]
    cuda = ["-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr"]
    cuda += ["-O0", "-g", "-G"] if debug else ["-O2"]
    if env.FLASHINFER_JIT_LINEINFO.get() and not debug:  # -G implies it
        cuda.append("-lineinfo")
    if use_fast_math:
        cuda.append("-use_fast_math")
    # A missing symbol is an error now, not when the module is loaded; those of the static CUDA
    # runtime stay private, next to the runtime that PyTorch has loaded.
    link = ["-shared", "-Wl,-z,defs", "-Wl,--exclude-libs,ALL"]
    return Flags(
        host=(*host, *extra_cflags, *env.FLASHINFER_EXTRA_CFLAGS.get()),
        cuda=(*cuda, *extra_cuda_cflags, *env.FLASHINFER_EXTRA_CUDAFLAGS.get()),
        link=(*link, *extra_ldflags, *env.FLASHINFER_EXTRA_LDFLAGS.get()),
    )


def with_targets(cuda_flags: Sequence[str], majors: list[int] | None = None) -> list[str]:
    """nvcc flags, with the targets of the compilation context if there is no ``-gencode``."""
    _, chosen = fingerprint.split_targets(cuda_flags)
    if chosen:
        return list(cuda_flags)
    return [*cuda_flags, *current_compilation_context.get_nvcc_flags_list(majors)]


def own_include_dirs(extra: Sequence[Path] = ()) -> list[Path]:
    """Search path whose headers count for the identity of a module."""
    return [jit_env.FLASHINFER_INCLUDE_DIR, jit_env.FLASHINFER_CSRC_DIR, *extra]


def external_include_dirs(toolkit: toolchain.Toolkit | None) -> list[str]:
    """Search path of TVM-FFI, DLPack and CUDA, which the toolchain stands for."""
    from tvm_ffi import libinfo

    found = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    found += toolkit.include_dirs if toolkit else ()
    return list(dict.fromkeys(map(str, found)))


def cudart_link_flags(toolkit: toolchain.Toolkit) -> list[str]:
    """Link the CUDA runtime: static where possible, so that a module loads without a driver."""
    if folder := toolkit.static_cudart():
        return [f"-L{folder}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    if library := toolkit.shared_cudart():
        return [library, f"-Wl,-rpath,{os.path.dirname(library)}"]
    return ["-lcudart"]


def tvm_ffi_link_flags() -> list[str]:
    """Link libtvm_ffi, which is in the process already when a module is loaded."""
    from tvm_ffi import libinfo

    return [f"-L{os.path.dirname(libinfo.find_libtvm_ffi())}", "-ltvm_ffi"]


def get_cuda_path() -> str:
    """Root folder of the CUDA toolkit."""
    return toolchain.require_toolkit().root


def get_cuda_version() -> Version:
    """Version of the CUDA toolkit, major and minor."""
    return Version(".".join(map(str, toolchain.require_toolkit().release)))


def is_cuda_version_at_least(version_str: str) -> bool:
    """Whether the CUDA toolkit is of this version (such as ``"12.9"``) or later."""
    return get_cuda_version() >= Version(version_str)


def get_system_includes(cuda_home: str) -> list[str]:
    """Folders of headers that a toolkit at `cuda_home` has."""
    return [str(path) for path in (Path(cuda_home) / "include",) if path.is_dir()]


def get_cccl_includes() -> list[str]:
    """Folders of CUDA's C++ libraries in the toolkit, since CUDA 13 beside its headers."""
    include = Path(get_cuda_path()) / "include"
    return [str(path) for path in (include / "cccl", include) if (path / "cub").is_dir()]


def host_compiler_is_gcc() -> bool:
    """Whether the C++ compiler for nvcc and bindings is GCC; no if there is none."""
    compiler = toolchain.find_host_compiler()
    return compiler is not None and "clang" not in os.path.basename(os.path.realpath(compiler.path))


def join_multiline(vs: Sequence[str]) -> str:
    """Words of a ninja file, one a line."""
    return " $\n    ".join(vs)


def parse_env_flags(env_var_name: str) -> list[str]:
    """The words of one of the variables of flags, such as ``FLASHINFER_EXTRA_CUDAFLAGS``.

    Raises
    ------
    ValueError
        If it is no variable of words that is declared in `flashinfer.env`.
    """
    variable = getattr(env, env_var_name, None)
    words = variable.get() if isinstance(variable, env.Variable) else None
    if not isinstance(words, tuple):
        raise ValueError(f"`env_var_name` must be a variable of flags, got {env_var_name!r}")
    return list(map(str, words))


def get_nvcc_parallelism_flags() -> list[str]:
    """``--threads`` as asked for; several threads help only with several targets."""
    threads = env.FLASHINFER_NVCC_THREADS.get()
    return [f"--threads={threads}"] if threads > 1 else []


@dataclass(frozen=True)
class NinjaModule:
    """Everything that ninja needs to build one module."""

    name: str
    sources: Sequence[Path]
    flags: Flags
    include_dirs: Sequence[Path]
    toolkit: toolchain.Toolkit | None
    host_compiler: toolchain.HostCompiler
    dsl: cute_dsl.CuteDsl | None = None

    def objects(self) -> list[str]:
        """Object file names, in the order of the sources."""
        names = [f"{source.stem}{_object_suffix(source)}" for source in self.sources]
        return [f"{i}_{n}" if names.count(n) > 1 else n for i, n in enumerate(names)]

    def links(self) -> dict[str, str]:
        """Folders whose path nvcc does not understand, each with the link that stands for it."""
        sources = [os.path.dirname(os.path.abspath(s)) for s in self._cuda_sources()]
        folders = [*map(str, self.include_dirs), *external_include_dirs(self.toolkit), *sources]
        awkward = dict.fromkeys(f for f in folders if _AWKWARD_FOR_NVCC.search(f))
        return {folder: f"link{i}" for i, folder in enumerate(awkward)} if sources else {}

    def _cuda_sources(self) -> list[Path]:
        return [source for source in self.sources if source.suffix in CUDA_SUFFIXES]

    def runtime_link_flags(self) -> list[str]:
        """Flags that link the CUDA runtime."""
        return cudart_link_flags(self.toolkit) if self.toolkit else []

    def problem_of(self, library: Path) -> str:
        """Nothing: one compiler lays out parameters for launcher and kernel."""
        return ""

    def commands(self, links: Mapping[str, str] | None = None) -> dict[str, str]:
        """Command of each rule, as ninja wants it: with `$in` and `$out`.

        Parameters
        ----------
        links : mapping, optional
            The name that nvcc is told instead of a folder.
        """
        links = links or {}
        host = [*env.FLASHINFER_CXX_LAUNCHER.get(), self.host_compiler.path]
        own = [f"-I{d}" for d in self.include_dirs]
        external = [w for d in external_include_dirs(self.toolkit) for w in ("-isystem", d)]
        link = [*self.flags.link, *tvm_ffi_link_flags()]
        cxx = _shell([*host, *self.flags.host, *own, *external])
        commands = {"cxx": f"{cxx} $headers -c $in -o $out"}
        if self.dsl:
            defines = [flag for flag in self.flags.host if flag.startswith("-D")]
            _, archs = fingerprint.split_targets(self.flags.cuda)
            dsl = _shell(self.dsl.command(defines, archs))
            commands["cute_dsl"] = f"{dsl} --out $out $in"
            link.append(self.dsl.runtime)
        if self.toolkit:
            link += self.runtime_link_flags()
            nvcc = [*env.FLASHINFER_NVCC_LAUNCHER.get(), self.toolkit.nvcc]
            nvcc += [f"-ccbin={self.host_compiler.path}", *get_nvcc_parallelism_flags()]
            own = [f"-I{links.get(str(d), d)}" for d in self.include_dirs]
            external = [links.get(word, word) for word in external]
            cuda = _shell([*nvcc, *self.flags.cuda, *own, *external])
            if self.flags.device_link:
                commands["nvcc"] = f"{cuda} -dc $flags $in -o $out"
                targets = [f for f in self.flags.cuda if "gencode" in f]
                dlink = _shell([*nvcc, *targets, "-Xcompiler=-fPIC", "-dlink"])
                commands["dlink"] = f"{dlink} $in -o $out -lcudadevrt"
                link += [f"-L{d}" for d in self.toolkit.library_dirs] + ["-lcudadevrt"]
            else:
                commands["nvcc"] = f"{cuda} -c $flags $in -o $out"
        commands["link"] = f"{_shell(host)} $in -o $out {_shell(link)}"
        return commands

    def rules(self, links: Mapping[str, str] | None = None) -> str:
        """The compile and link rules of `build.ninja`."""
        lines = ["ninja_required_version = 1.8", ""]
        for name, command in self.commands(links).items():
            lines += [f"rule {name}", f"  command = {command}", ""]
        return "\n".join(lines)

    def edges(self, folder: str = "", links: Mapping[str, str] | None = None) -> str:
        """The build statements of `build.ninja`, with the outputs in a folder."""
        prefix = f"{ninja_path(folder)}/" if folder else ""
        lines, objects = [], []
        named = list(zip(self.sources, self.objects(), strict=True))
        kernels = [ninja_path(name) for source, name in named if _rule(source) == "cute_dsl"]
        for source, name in named:
            rule = _rule(source)
            place, file = os.path.split(os.path.abspath(source))
            if rule == "nvcc":
                place = (links or {}).get(place, place)
            path = ninja_path(os.path.join(place, file))
            # The DSL writes a header beside its object, which launchers include.
            first = (
                f" | {' '.join(prefix + o for o in kernels)}" if rule == "cxx" and kernels else ""
            )
            lines.append(f"build {prefix}{ninja_path(name)}: {rule} {path}{first}")
            if first:
                lines.append(f"  headers = -I{ninja_path(folder) or '.'}")
            if more := self.flags.cuda_by_source.get(str(source)):
                lines.append(f"  flags = {_shell(more)}")
            objects.append(prefix + ninja_path(name))
        if self.flags.device_link:
            linked = f"{prefix}{ninja_path(self.name)}.dlink.o"
            device = [o for o in objects if o.endswith(".cuda.o")]
            lines.append(f"build {linked}: dlink {' '.join(device)}")
            objects.append(linked)
        lines.append(f"build {prefix}{ninja_path(self.name)}.so: link {' '.join(objects)}")
        return "\n".join(lines) + "\n"

    def text(self, folder: str = "") -> str:
        """The whole of `build.ninja`, with the outputs and the links in a folder."""
        links = {place: os.path.join(folder, name) for place, name in self.links().items()}
        return f"{self.rules(links)}\n{self.edges(folder, links)}"

    def compile_commands(self, directory: Path) -> list[dict[str, str]]:
        """Entries of `compile_commands.json`, for editors."""
        commands = self.commands()
        entries = []
        for source, name in zip(self.sources, self.objects(), strict=True):
            rule = _rule(source)
            if rule == "cute_dsl":
                continue  # Python, for which editors need no flags
            more = _shell(self.flags.cuda_by_source.get(str(source), ()))
            command = commands[rule].replace("$flags", more).replace(" $headers", "")
            command = command.replace("$in", shlex.quote(os.path.abspath(source)))
            command = command.replace("$out", shlex.quote(name)).replace("$$", "$")
            entries.append(
                {"directory": str(directory), "file": os.path.abspath(source), "command": command}
            )
        return entries


def _rule(source: Path) -> str:
    """Which rule compiles a source."""
    if source.suffix in CUDA_SUFFIXES:
        return "nvcc"
    return "cute_dsl" if source.suffix in cute_dsl.SUFFIXES else "cxx"


def _object_suffix(source: Path) -> str:
    return ".cuda.o" if source.suffix in CUDA_SUFFIXES else ".o"


def _shell(words: Sequence[str]) -> str:
    """Words for a shell inside a ninja file."""
    return shlex.join(words).replace("$", "$$")


def ninja_path(path: str) -> str:
    """A path in a ninja build statement."""
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def build_common_cflags(
    cuda_home: str, extra_include_dirs: Sequence[Path] | None = None
) -> list[str]:
    """Search paths for both compilers: the package's, the extra ones, TVM-FFI's, a toolkit's.

    `cuda_home` is the root folder of the toolkit.
    """
    own = [f"-I{folder}" for folder in own_include_dirs(list(extra_include_dirs or ()))]
    external = [*external_include_dirs(None), os.path.join(cuda_home, "include")]
    return own + [word for folder in external for word in ("-isystem", folder)]


def build_cflags(
    common_cflags: Sequence[str], extra_cflags: Sequence[str] | None = None
) -> list[str]:
    """Flags for the host compiler: the common ones, the package's, the extra ones."""
    return [*common_cflags, *build_flags(extra_cflags or (), (), (), False).host]


def build_cuda_cflags(
    common_cflags: Sequence[str], extra_cuda_cflags: Sequence[str] | None = None
) -> list[str]:
    """Flags for nvcc, likewise; without a ``-gencode`` those of the compilation context join."""
    flags = build_flags((), extra_cuda_cflags or (), (), False)
    return [*common_cflags, *with_targets(flags.cuda)]


def generate_ninja_build_for_op(
    name: str,
    sources: Sequence[Path],
    extra_cflags: Sequence[str] | None,
    extra_cuda_cflags: Sequence[str] | None,
    extra_ldflags: Sequence[str] | None,
    extra_include_dirs: Sequence[Path] | None,
    needs_device_linking: bool = False,
    embedded_cubins: Mapping[str, Path] | None = None,
    extra_cuda_cflags_by_source: Mapping[Path, Sequence[str]] | None = None,
) -> str:
    """Text of a ``build.ninja`` that makes ``<name>.so`` of the sources, in its own folder.

    Parameters are those of `flashinfer.jit.gen_jit_spec`; `embedded_cubins` must be left out.

    Raises
    ------
    ValueError
        If the name or a source is not acceptable, or `embedded_cubins` is given.
    ToolchainError
        If a compiler is missing.
    """
    if embedded_cubins:
        raise ValueError(f"`embedded_cubins` must be left out, got {list(embedded_cubins)}")
    files = [checked_source(checked_name(name), source) for source in sources]
    flags = build_flags(extra_cflags or (), extra_cuda_cflags or (), extra_ldflags or (), False)
    by_source = {str(k): tuple(v) for k, v in (extra_cuda_cflags_by_source or {}).items()}
    cuda = tuple(with_targets(flags.cuda))
    module = NinjaModule(
        name,
        files,
        Flags(flags.host, cuda, flags.link, by_source, needs_device_linking),
        own_include_dirs(list(extra_include_dirs or ())),
        toolchain.require_toolkit(),
        toolchain.require_host_compiler(),
    )
    return module.text()


def run_ninja(workdir: Path, ninja_file: Path, verbose: bool, max_jobs: int | None = None) -> None:
    """Run ninja in a folder.

    Parameters
    ----------
    workdir, ninja_file : Path
        The folder to work in, and the file that says what is built.
    verbose : bool
        Print the commands and what they say.
    max_jobs : int, optional
        Commands at a time; by default ninja's own number.

    Raises
    ------
    BuildError
        If a command fails; the message is what was printed.
    ToolchainError
        If ninja is missing.
    """
    command = [toolchain.require_ninja(), "-C", str(workdir), "-f", str(ninja_file)]
    command += [f"-j{max_jobs}"] if max_jobs is not None else []
    command += ["-v"] if verbose else []
    show = (lambda line: print(line, end="")) if verbose else (lambda line: None)
    output, status = process.run_ninja(command, show, lambda: None)
    if status != 0:
        raise BuildError(f"ninja failed in {workdir}:\n{output}")
