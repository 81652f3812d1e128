"""Third-party headers: which version, and where they lie. Nothing is looked for until asked.

A copy of one's own under `3rdparty/<name>/include` comes first, then the installed distribution
that carries the headers.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ThirdParty:
    """Headers that come from a Python distribution.

    Attributes
    ----------
    name : str
        Folder under `3rdparty/`, and name of the extra that installs the headers.
    distribution : str
        Python distribution that carries them.
    version : str
        The version that our sources are written against; another one is refused.
    include : str
        Include folder inside the installed distribution.
    probe : str
        A header that must lie in the include folder.
    """

    name: str
    distribution: str
    version: str
    include: str
    probe: str

    @property
    def requirement(self) -> str:
        """The requirement that pip installs."""
        return f"{self.distribution}=={self.version}"


# The one place that pins CUTLASS; a test keeps the extra in pyproject.toml equal to it.
CUTLASS = ThirdParty(
    name="cutlass",
    distribution="nvidia-cutlass",
    version="4.2.0.0",
    include="cutlass_library/source/include",
    probe="cutlass/cutlass.h",
)


@functools.cache
def find_include_dir(headers: ThirdParty) -> Path:
    """Include folder of third-party headers.

    Parameters
    ----------
    headers : ThirdParty
        The headers to find, e.g. `CUTLASS`.

    Returns
    -------
    Path
        Folder to pass to the compiler with `-I`.

    Raises
    ------
    FileNotFoundError
        If the headers are not installed, or in another version. The message says what to install.
    """
    for base in (PACKAGE_DIR / "data", PACKAGE_DIR.parent):
        own = base / "3rdparty" / headers.name / "include"
        if (own / headers.probe).is_file():
            return own
    install = f'install them with: pip install "{headers.requirement}"'
    try:
        distribution = importlib.metadata.distribution(headers.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the {headers.name} headers are not installed; {install} "
            f"(or, in the checkout: pip install -e '.[{headers.name}]')"
        ) from None
    if distribution.version != headers.version:
        raise FileNotFoundError(
            f"{headers.distribution} {distribution.version} is installed, "
            f"but {headers.version} is needed; {install}"
        )
    include = Path(str(distribution.locate_file(headers.include)))
    if not (include / headers.probe).is_file():
        raise FileNotFoundError(f"{include} does not contain {headers.probe}; {install}")
    return include
