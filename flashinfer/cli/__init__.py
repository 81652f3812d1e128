"""The command line. One file per group of commands; what they print goes through `tables`.

Exit codes: 0 done, 1 failed, 2 wrong usage (click's own), 3 the answer is "no" (`module-status
--check` when a module is not built, `replay --compare` when results differ, `compare-sass` and
`compare-compilers` when machine code does, `list-cubins` when one is refused), 4 `module-status
--verify` found damage.
"""

from __future__ import annotations

import importlib

import click

from .. import version as package

# The file of each command, and what `flashinfer --help` says of it. Files are imported when their
# command is asked for: the help does not wait for PyTorch.
COMMANDS = {
    "build": ("modules", "Build modules ahead of their first use."),
    "build-cubins": ("cubins", "Compile kernels for machines without any compiler."),
    "build-host-parts": ("distributions", "Compile what a wheel needs to run with NVRTC alone."),
    "clear-cache": ("cache", "Remove the compiled modules of this version."),
    "clear-cubin": ("cubins", "Remove the downloaded cubins."),
    "collect-env": ("environment", "Collect versions, GPUs, toolchain, cache and variables."),
    "compare-compilers": ("compilers", "Compare what nvcc and NVRTC make of modules."),
    "compare-sass": ("sass", "Compare the machine code of this package with another's."),
    "download-cubin": ("cubins", "Download cubins from the repository that is set."),
    "download-kernels": ("wheels", "Install both wheels of prebuilt kernels."),
    "export-compile-commands": ("modules", "Write compile_commands.json for clangd."),
    "install-cubin-wheel": ("wheels", "Install the wheel of cubins of this version."),
    "install-jit-cache-wheel": ("wheels", "Install the wheel of modules of this version."),
    "list-cubins": ("cubins", "List the cubins on disk, with what is wrong with them."),
    "list-modules": ("modules", "List the generators of modules, and their modules."),
    "module-status": ("modules", "Show which modules are built."),
    "new-op": ("new_op", "Write the files of an element-wise operation."),
    "replay": ("replay", "Run recorded calls again."),
    "show-config": ("environment", "Show how modules are found and built, and every variable."),
}


class _Commands(click.Group):
    """The commands of this file, and those of `COMMANDS`."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*self.commands, *COMMANDS])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return super().get_command(context, name)
        group = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
        return next(command for command in group.COMMANDS if command.name == name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        ours = {name: command.get_short_help_str() for name, command in self.commands.items()}
        texts = ours | {name: text for name, (_, text) in COMMANDS.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, texts[name]) for name in self.list_commands(context)])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package.__version__, "--version", message="flashinfer %(version)s")
def main() -> None:
    """FlashInfer: look at this installation, build kernels before use, replay recorded calls."""


@main.command()
def version() -> None:
    """Print version and commit."""
    click.echo(f"{package.__version__} ({package.__git_version__})")
