#!/usr/bin/env python3
"""Times FlashInfer's operations and checks them against their references.

    python benchmarks/flashinfer_benchmark.py --routine rmsnorm --batch_size 64 --refcheck
    python benchmarks/flashinfer_benchmark.py --testlist benchmarks/samples/norm.txt
    python benchmarks/flashinfer_benchmark.py --options

Exit status: 0 if everything ran (and, with --refcheck, is right), 1 if a check failed or a routine
raised, 2 for a wrong command line, 3 if there is no usable GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import option_table
import report
from harness import GpuTimer, Timer, gpu_complaint, run_case
from routines import ROUTINES, Routine
from routines.base import not_negative, positive

OK, FAILED, USAGE, NO_GPU = 0, 1, 2, 3


class UsageError(Exception):
    """The command line is wrong; the message says how."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _common_parser() -> _Parser:
    parser = _Parser(
        description="Time FlashInfer's operations. A routine adds its flags: --list_routines.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--routine", help="operation to time")
    what.add_argument(
        "--backends", nargs="+", help="implementations; the routine's first by default"
    )
    what.add_argument(
        "--testlist", metavar="FILE", help="one set of flags per line; # starts a comment"
    )
    what.add_argument(
        "--list_routines", action="store_true", help="print routines, backends, flags"
    )
    what.add_argument(
        "--options", action="store_true", help="print what each option of attention costs"
    )
    how = parser.add_argument_group("how to time")
    clock = how.add_mutually_exclusive_group()
    clock.add_argument(
        "--use_cupti", action="store_true", help="CUPTI (the default), where it works"
    )
    clock.add_argument("--use_cuda_events", action="store_true", help="events instead of CUPTI")
    how.add_argument("--no_cuda_graph", action="store_true", help="launch directly, not in a graph")
    how.add_argument(
        "--num_iters", type=_checked(positive), help="timed iterations; 100 ms worth by default"
    )
    how.add_argument(
        "--dry_run_iters",
        type=_checked(not_negative),
        help="untimed iterations; 25 ms worth by default",
    )
    how.add_argument("--warm_l2", action="store_true", help="leave the inputs in the L2 cache")
    how.add_argument("--random_seed", type=_checked(not_negative), default=42)
    output = parser.add_argument_group("checks and output")
    output.add_argument("--refcheck", action="store_true", help="compare with the reference first")
    output.add_argument("--output_path", metavar="FILE", help="append to a .csv or .jsonl file")
    output.add_argument("--case_tag", help="a name for the rows in the output")
    output.add_argument(
        "--generate_repro_command", action="store_true", help="print each case's command"
    )
    output.add_argument(
        "-v", "--verbose", action="count", default=0, help="-v settings, -vv spread"
    )
    return parser


def _routine_parser(routine: Routine) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for flag in routine.flags:
        if flag.parse is bool:
            parser.add_argument(f"--{flag.name}", action="store_true", help=flag.help)
        else:
            parser.add_argument(
                f"--{flag.name}", type=_checked(flag.parse), default=flag.default, help=flag.help
            )
    return parser


def parse_case(argv: Sequence[str]) -> Namespace:
    """The flags of one case, those of its routine included.

    Raises
    ------
    UsageError
        If a flag is unknown to the routine, or a value is not allowed.
    """
    case, rest = _common_parser().parse_known_args(argv)
    if case.list_routines or case.options or (case.testlist and not case.routine):
        return case
    if case.routine not in ROUTINES:
        got = (
            f"unknown routine {case.routine!r}"
            if case.routine
            else "--routine or --testlist is needed"
        )
        raise UsageError(f"{got}; routines are {', '.join(ROUTINES)}")
    routine = ROUTINES[case.routine]
    flags = " ".join(f"--{flag.name}" for flag in routine.flags)
    try:
        _routine_parser(routine).parse_args(rest, namespace=case)
    except UsageError as error:
        raise UsageError(f"{error} (flags of {routine.name}: {flags})") from error
    asked = case.backends or [next(iter(routine.backends))]
    case.backends = [backend for backend in asked if backend in routine.backends]
    there = f"{routine.name} has no backend {{!r}}; it has {', '.join(routine.backends)}"
    if not case.backends:
        raise UsageError(there.format(asked[0]))
    for backend in asked:
        if backend not in case.backends:  # lists are written for several libraries
            print(f"skipped: {there.format(backend)}", file=sys.stderr)
    return case


def read_testlist(path: str, outer: Sequence[str]) -> list[Namespace]:
    """The cases of a test list: the flags of each line after those of the command line.

    Raises
    ------
    UsageError
        Naming the line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"--testlist {path}: {error.strerror}") from error
    cases = []
    for number, text in enumerate(lines, 1):
        try:
            words = shlex.split(text, comments=True)
            if not words:
                continue
            for flag in ("--testlist", "--output_path", "--list_routines"):
                if flag in words:
                    raise UsageError(f"{flag} belongs on the command line")
            case = parse_case([*outer, *words])
            if not case.routine:
                raise UsageError("--routine is missing")
            cases.append(case)
        except (UsageError, ValueError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
    if not cases:
        raise UsageError(f"--testlist {path}: no case in it")
    return cases


def repro_command(case: Namespace, backend: str) -> str:
    """A command that repeats one case with one backend, every flag that shapes it spelled out."""
    words = ["--routine", case.routine, "--backends", backend]
    for flag in ROUTINES[case.routine].flags:
        value = getattr(case, flag.name)
        if flag.parse is bool:
            words += [f"--{flag.name}"] if value else []
        else:
            words += [f"--{flag.name}", str(value)]
    for name in ("num_iters", "dry_run_iters", "random_seed", "case_tag"):
        if getattr(case, name) is not None:
            words += [f"--{name}", str(getattr(case, name))]
    for name in ("use_cupti", "use_cuda_events", "no_cuda_graph", "warm_l2", "refcheck"):
        words += [f"--{name}"] if getattr(case, name) else []
    return shlex.join(["python", "benchmarks/flashinfer_benchmark.py", *words])


def _list_routines() -> int:
    lines = []
    for routine in ROUTINES.values():
        lines.append(f"{routine.name}  (backends: {', '.join(routine.backends)})")
        for flag in routine.flags:
            default = "" if flag.parse is bool else f" [{flag.default}]"
            lines.append(f"    --{flag.name:<14} {flag.help}{default}")
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `| head` has read enough; the flush at exit needs a place to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _print_options() -> int:
    if complaint := gpu_complaint():
        print(complaint, file=sys.stderr)
        return NO_GPU
    option_table.print_options()
    return OK


def _shape(case: Namespace) -> str:
    """The case's flags on one line, switches that are off left out."""
    words = []
    for flag in ROUTINES[case.routine].flags:
        value = getattr(case, flag.name)
        if value is True:
            words.append(flag.name)
        elif value not in (False, flag.default) or flag.name in ("batch_size", "hidden_size"):
            words.append(f"{flag.name}={value}")
    return " ".join(words)


def _run(cases: Sequence[Namespace], timer: Timer, sink: report.Sink | None) -> int:
    failed = 0
    for case in cases:
        for backend in case.backends:
            repro = repro_command(case, backend)
            row, details = run_case(ROUTINES[case.routine], backend, case, timer, repro)
            print(report.line(row, _shape(case)), flush=True)
            if row["status"] != "ok":
                failed += 1
                print(details.rstrip(), file=sys.stderr)
            if case.generate_repro_command:
                print(f"    {repro}")
            for text in report.details(row, case.refcheck)[: case.verbose]:
                print(f"    {text}")
            if sink:
                sink.write(row)
    if failed:
        print(f"{failed} failed", file=sys.stderr)
    return FAILED if failed else OK


def main(argv: Sequence[str] | None = None, timer: Timer | None = None) -> int:
    """Run the command line; returns the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.
    timer : Timer, optional
        The clock of measurements; the GPU by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        case = parse_case(argv)
        if case.list_routines:
            return _list_routines()
        if case.options:
            return _print_options()
        cases = read_testlist(case.testlist, argv) if case.testlist else [case]
        names = list(dict.fromkeys(f.name for r in ROUTINES.values() for f in r.flags))
        if timer is None and (complaint := gpu_complaint()):
            print(f"{complaint}; --list_routines works without one", file=sys.stderr)
            return NO_GPU
        sink = report.open_sink(case.output_path, names) if case.output_path else None
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return _run(cases, timer or GpuTimer(), sink)


if __name__ == "__main__":
    sys.exit(main())
