"""Installs a wheel into a new environment, with pip alone, and runs ``tests/smoke.py`` there.

    python -m tests.install_check                       newest dependencies, this Python
    python -m tests.install_check --python python3.13   another Python
    python -m tests.install_check --lowest              the lowest version of each dependency

It downloads what pip needs (gigabytes, with PyTorch for CUDA), and removes all of it at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("", "serve")


def requirements(wheel: Path, extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """Requirements of a wheel, with the given extras ("" stands for the wheel without one)."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    found = (Requirement(text) for text in metadata.get_all("Requires-Dist", []))
    return [
        r for r in found if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)
    ]


def lowest(wheel: Path, extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """The lowest version of each requirement, as pip takes it.

    Raises
    ------
    ValueError
        If a requirement has no lower bound.
    """
    pins = []
    for requirement in requirements(wheel, extras):
        bounds = [s.version for s in requirement.specifier if s.operator in (">=", "==")]
        if len(bounds) != 1:
            raise ValueError(f"{requirement} has no lower bound")
        pins.append(f"{requirement.name}=={bounds[0]}")
    return pins


def _run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the settings of this checkout, and return what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "FLASHINFER_"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(
    python: str, wheel: Path, pins: list[str], folder: Path, beside: tuple[Path, ...] = ()
) -> dict[str, object]:
    """Install a wheel with its example server, and return what the smoke test reports.

    Parameters
    ----------
    python : str
        Interpreter of the new environment.
    wheel : Path
        The wheel.
    pins : list of str
        Requirements beyond the wheel's own.
    folder : Path
        An empty folder for the environment.
    beside : tuple of Path
        Wheels of prebuilt modules or kernels that are installed with it.

    Raises
    ------
    RuntimeError
        If a command fails.
    """
    _run(python, "-m", "venv", folder / "venv", cwd=folder)
    inside = folder / "venv" / "bin" / "python"
    _run(inside, "-m", "pip", "install", "-q", f"{wheel}[serve]", *beside, *pins, cwd=folder)
    _run(inside, "-m", "pip", "check", cwd=folder)
    shutil.copy(ROOT / "tests" / "smoke.py", folder)
    report = json.loads(_run(inside, "smoke.py", cwd=folder).splitlines()[-1])
    assert str(report["location"]).startswith(str(folder)), "the checkout was tested instead"
    _run(inside, "-m", "flashinfer", "list-cubins", cwd=folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    words = ("-m", "examples.serve", "generate", "Once", "--max-tokens", "2", "--device", "cpu")
    _run(inside, *words, cwd=folder)
    _run(inside, "-c", "import examples.serve.server", cwd=folder)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.install_check")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--lowest", action="store_true", help="the lowest dependencies")
    parser.add_argument("--wheel", type=Path, help="the wheel; by default one is built")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="flashinfer-install-") as temporary:
        folder = Path(temporary)
        wheel = options.wheel and options.wheel.resolve()
        if wheel is None:
            build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o")
            _run(*build, folder, ROOT, cwd=folder)
            (wheel,) = folder.glob("*.whl")
        pins = lowest(wheel) if options.lowest else []
        try:
            report = check(options.python, wheel, pins, folder)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps(report | {"pins": pins}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
