"""The base of the wrappers over pages."""

from __future__ import annotations


class PagedWrapper:
    """A mixin for the wrappers over pages."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Nothing to compile beforehand: any strides are arguments of the one kernel.

        Parameters
        ----------
        variant : {"independent", "equal", "runtime"}
            How strides of keys and values relate.

        Raises
        ------
        ValueError
            If `variant` is another.
        """
        if variant not in ("independent", "equal", "runtime"):
            raise ValueError(
                f"`variant` must be 'independent', 'equal' or 'runtime', got {variant!r}"
            )
