"""Draws where a decode step goes: `--plot` of the demo, which needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from .decode_step import DecodeStep


def write_plot(step: DecodeStep, title: str, path: Path) -> None:
    """A bar for each part of a step, and a line where the whole step would end at its floor.

    Parameters
    ----------
    step : DecodeStep
        With recorded kernels.
    title : str
        Model and GPU.
    path : Path
        File, as SVG unless its name ends otherwise.

    Raises
    ------
    ValueError
        If the profiler recorded nothing.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shares = {part: ms for part, ms in step.shares().items() if ms}
    if not shares:
        raise ValueError("`step` must have recorded kernels, it has none")
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(shares) + 1.4))
    begin = 0.0
    for row, ms in enumerate(shares.values()):
        axes.barh(row, ms, left=begin)
        axes.text(begin + ms, row, f" {ms:.3f}", va="center")
        begin += ms
    axes.axvline(step.floor_ms, color="black", linestyle=":")
    axes.text(step.floor_ms, -0.9, "floor", ha="center")
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step, one part after the other")
    axes.set_title(title, pad=18)
    axes.margins(x=0.12)
    figure.savefig(path, format=path.suffix[1:] or "svg", bbox_inches="tight")
    pyplot.close(figure)
