"""Results on the terminal and in files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]

# Columns before and after the routines' own flags. Files keep this order.
LEADING = (
    "routine",
    "backend",
    "case_tag",
    "status",
    "median_us",
    "std_us",
    "min_us",
    "tb_per_sec",
    "percent_of_copy",
    "tflops_per_sec",
)
TRAILING = (
    "bytes",
    "flops",
    "clock",
    "num_iters",
    "cold_l2",
    "random_seed",
    "device",
    "copy_tb_per_sec",
    "flashinfer_version",
    "torch_version",
    "repro_command",
)


class Sink(Protocol):
    """Receives one row per timed call."""

    def write(self, row: Row) -> None: ...


class CsvSink:
    """Appends to a CSV file; a new file starts with a header.

    Rows are on disk as soon as they are written, so an interrupted run keeps what it has.
    """

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path, self.columns = path, columns
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])
            if header != columns:
                raise ValueError(
                    f"{path} has other columns than this version writes; name a new file"
                )
        else:
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(columns)

    def write(self, row: Row) -> None:
        """Append ``row``; what it lacks stays empty."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(row)


class JsonLinesSink:
    """Appends one JSON object per line; fields that do not apply are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.open("a").close()  # an unusable path is refused before anything is timed

    def write(self, row: Row) -> None:
        """Append ``row``."""
        with self.path.open("a") as file:
            file.write(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n")


def open_sink(path: str, flag_names: list[str]) -> Sink:
    """The sink for a file name: ``.csv``, ``.jsonl`` or ``.json`` (lines as well).

    Raises
    ------
    ValueError
        If the extension is another one, or the file cannot be appended to.
    """
    target = Path(path)
    try:
        if target.suffix == ".csv":
            return CsvSink(target, [*LEADING, *flag_names, *TRAILING])
        if target.suffix in (".jsonl", ".json"):
            return JsonLinesSink(target)
    except OSError as error:
        raise ValueError(f"--output_path {path}: {error.strerror}") from error
    raise ValueError(f"--output_path {path}: the extension must be .csv, .jsonl or .json")


def line(row: Row, shape: str) -> str:
    """One terminal line for a row."""
    head = f"{row['routine']:<24} {row['backend']:<6} {shape}"
    if row["median_us"] is None:
        return f"{head}  {row['status']}"
    text = (
        f"{head}  {row['median_us']:9.3f} us  {row['tb_per_sec']:6.3f} TB/s  "
        f"{row['percent_of_copy']:5.1f} % of copy"
    )
    if row["tflops_per_sec"] is not None:
        text += f"  {row['tflops_per_sec']:7.1f} TFLOP/s"
    return text


def details(row: Row, refcheck: bool) -> list[str]:
    """Further terminal lines, one per level of verbosity; none for a row without a time."""
    if row["median_us"] is None:
        return []
    checked = "checked against the reference" if refcheck else "not checked"
    return [
        f"{row['clock']}, {row['num_iters']} iterations, {row['bytes']} bytes, {checked}",
        f"min {row['min_us']:.3f} us, std {row['std_us']:.3f} us, "
        f"copy {row['copy_tb_per_sec']:.3f} TB/s on {row['device']}",
    ]
