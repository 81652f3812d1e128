"""A program: compiles a kernel that is written in CuTe-DSL.

Ninja starts it. A crash or a hang in the compiler ends this process and no other.

    cute_dsl_compile.py --arch 90a --path FOLDER ... -DFLASHINFER_CFG_HIDDEN=4096 ...
                        --out FOLDER/NAME.o FOLDER/NAME.py

The source has a function ``instance``. Its arguments are those of the defines, in lower case; it
returns the kernel and arguments of the types that it is compiled for. Outputs are the object and
NAME.h beside it, with ``cute_dsl_NAME_wrapper`` and what loads the cubin.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import sys
import types
from typing import Any

_PREFIX = "FLASHINFER_CFG_"
# Whatever the machine at hand has: the object runs on every one.
_HOSTS = {
    "x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2",
    "aarch64": "linux-aarch64",
}


def configuration(defines: list[str]) -> dict[str, Any]:
    """The arguments of ``instance``: numbers where they are digits, else words."""
    found: dict[str, Any] = {}
    for define in defines:
        name, _, token = define.partition("=")
        if name.startswith(_PREFIX):
            value = int(token) if token.lstrip("-").isdigit() else token
            found[name.removeprefix(_PREFIX).lower()] = value
    return found


def kernel_module(source: str) -> Any:
    """The module of a source, which finds its siblings and not the package that it lies in.

    FlashInfer's own import takes longer than the compilation.
    """
    folder, file = os.path.split(os.path.abspath(source))
    package = types.ModuleType("kernels")
    package.__path__ = [folder]
    sys.modules["kernels"] = package
    return importlib.import_module(f"kernels.{os.path.splitext(file)[0]}")


def compile_kernel(source: str, config: dict[str, Any], arch: str, out: str) -> None:
    """Compile the kernel of a configuration and write its object and header."""
    from cutlass import cute  # type: ignore[import-not-found, unused-ignore]

    kernel, arguments = kernel_module(source).instance(**config)
    host = _HOSTS[platform.machine()]
    options = f"--gpu-arch sm_{arch} --host-target '{host}'"
    compiled = cute.compile(kernel, *arguments, options=options)
    folder, file = os.path.split(os.path.abspath(out))
    compiled.export_to_c(folder, os.path.splitext(file)[0])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", required=True)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--out", required=True)
    parser.add_argument("-D", dest="defines", action="append", default=[])
    parser.add_argument("source")
    given = parser.parse_args(arguments)
    # Python puts the folder of the program there, whose modules have names of other packages.
    sys.path[:] = [*given.path, *sys.path[1:]]
    # Only what the command says counts, since only that is part of the module's identity.
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        del os.environ[name]
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    try:
        compile_kernel(given.source, configuration(given.defines), given.arch, given.out)
    except Exception as error:
        # On one line and without colours: the line with "error" is what a user sees.
        message = " ".join(re.sub(r"\x1b\[[\d;]*m", "", str(error)).split())
        print(f"{given.source}: error: {type(error).__name__}: {message}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
