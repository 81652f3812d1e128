"""Plots of measurements, as SVG: the files of `benchmarks/results/`, and the choice of kernels.

A result file names the section of `docs/performance.md` that has its numbers in a table; the plot
comes at the end of that section. Its cases map a name to the values of each program: a number, or
the lowest and the highest of several machines.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
CHOICES = BENCHMARKS / "prefill_backends_h200.csv"

STYLE = {"here": ("#0b6e4f", "o"), "peer": ("#c8553d", "D"), "cuDNN": ("#5b6c9e", "s")}
# The same bytes from the same numbers; letters stay letters.
matplotlib.rcParams |= {"svg.hashsalt": "flashinfer", "svg.fonttype": "none", "font.size": 9}


@dataclass(frozen=True)
class Plot:
    """A picture and where it goes."""

    page: str
    section: str
    file: str
    caption: str


@dataclass(frozen=True)
class Plots:
    """All plots of a site."""

    plots: tuple[Plot, ...]

    def add_to(self, page: str, text: str) -> str:
        """The text of a page with its plots, each at the end of its section."""
        for plot in self.plots:
            if plot.page == page:
                head, mark, rest = text.partition(f"\n## {plot.section}\n")
                if not mark:
                    raise ValueError(f"{plot.file}: {page} has no section '{plot.section}'")
                body, following, tail = rest.partition("\n## ")
                picture = f"\n\n![{plot.caption}](/pictures/{plot.file})\n"
                text = head + mark + body.rstrip() + picture + following + tail
        return text


def results() -> dict[str, dict[str, Any]]:
    """The result files, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def write(folder: Path) -> Plots:
    """Draw all plots into `folder`, and say where they go."""
    folder.mkdir(parents=True)
    plots = []
    for name, result in results().items():
        _save(_dots(result), folder / f"{name}.svg")
        caption = f"{result['title']} on one {result['gpu']}: {result['command']}"
        plots.append(Plot("performance", result["section"], f"{name}.svg", caption))
    _save(_choices(), folder / "kernel_choice.svg")
    caption = f"{CHOICES.name}: the time of fa2 in times of fa3, by the time of fa2"
    plots.append(Plot("tuning/kernel_choice", "Today", "kernel_choice.svg", caption))
    return Plots(tuple(plots))


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)


def _dots(result: dict[str, Any]) -> Any:
    """One row for each case, one dot for each program; a line joins the values of machines."""
    cases = result["cases"]
    figure, axes = pyplot.subplots(figsize=(6.5, 0.7 + 0.27 * len(cases)))
    for row, values in enumerate(cases.values()):
        for program, value in values.items():
            colour, marker = STYLE[program]
            ends = value if isinstance(value, list) else [value]
            axes.plot(ends, [row] * len(ends), color=colour, marker=marker, ms=5, lw=2, alpha=0.85)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    if result["better"] == "less":  # times of one plot differ a hundredfold
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(LogLocator(subs=()))
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(f"{result['unit']} ({result['better']} is better)")
    axes.set_title(result["title"], loc="left", fontsize=10, pad=22)
    programs = {program for values in cases.values() for program in values}
    for program in (name for name in STYLE if name in programs):
        colour, marker = STYLE[program]
        axes.plot([], [], color=colour, marker=marker, ls="", label=program)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncol=3, frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _choices() -> Any:
    with CHOICES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(6.5, 3.2))
    for mask, (colour, marker) in zip(
        sorted({row["mask"] for row in rows}), STYLE.values(), strict=False
    ):
        chosen = [row for row in rows if row["mask"] == mask]
        times = [float(row["fa2 us"]) for row in chosen]
        ratios = [float(row["fa2 / fa3"]) for row in chosen]
        axes.scatter(times, ratios, s=9, color=colour, marker=marker, alpha=0.6, label=mask)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time of fa2, us")
    axes.set_ylabel("fa2 / fa3")
    axes.set_title("Where Hopper's kernel is faster: above the line", loc="left", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
