"""`python -m flashinfer` and the console script `flashinfer`."""

from __future__ import annotations

from .cli import main

cli = main

if __name__ == "__main__":
    main()
