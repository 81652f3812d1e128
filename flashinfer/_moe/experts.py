"""The experts of a mixture: two grouped products between a map of rows and a sum.

Products read tokens through the map, so no copy of the input is made. The first one applies bias
and activation to its sums. Its result has a row for each chosen expert, the second one's too, and
`combine` adds up a token's rows in the order of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..gemm._choice import GemmProblem
from ..gemm._launch import launch
from ..quantization._kernels import quantize_rows
from .maps import RowMap, combine, map_rows


@dataclass(frozen=True)
class Experts:
    """The weights of the experts that are here.

    Attributes
    ----------
    fc1 : torch.Tensor
        ``[experts, columns, hidden]``, bfloat16, float16 or float8_e4m3fn; columns are twice the
        intermediate size where the activation is gated.
    fc2 : torch.Tensor
        ``[experts, hidden, intermediate]``, dtype of `fc1`.
    activation : str
        An activation of `GemmConfig`.
    scales : (torch.Tensor, torch.Tensor), optional
        The scales of 8-bit weights, float32: ``[experts, columns / 128, hidden / 128]`` and
        ``[experts, hidden / 128, intermediate / 128]``.
    biases : (torch.Tensor or None, torch.Tensor or None)
        ``[experts, columns]`` and ``[experts, hidden]``, dtype of the activations.
    gate : tuple, optional
        alpha, beta and limit of the gated activation: numbers or ``[experts]``, float32.
    first_expert : int
        The number of the first expert.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    activation: str
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    gate: tuple[Any, Any, Any] | None = None
    first_expert: int = 0

    def run(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        """The sum of the chosen experts' results.

        Parameters
        ----------
        x : torch.Tensor
            ``[tokens, hidden]``, bfloat16 or float16.
        chosen : torch.Tensor
            ``[tokens, top_k]``, int32 or int64: experts; those that are not here count nothing.
        weights : torch.Tensor
            ``[tokens, top_k]``, float32.
        out : torch.Tensor
            ``[tokens, hidden]``: receives the result.
        """
        rows = map_rows(chosen, self.first_expert, self.fc1.shape[0], enable_pdl)
        hidden = self._product(1, x, rows, enable_pdl)
        result = self._product(2, hidden, rows, enable_pdl)
        combine(out, result, rows.entry_row, weights, enable_pdl)
        return out

    def _product(
        self, number: int, a: torch.Tensor, rows: RowMap, enable_pdl: bool | None
    ) -> torch.Tensor:
        """Rows of all experts: of the first product gathered and activated, of the second plain."""
        first = number == 1
        b = self.fc1 if first else self.fc2
        scales = None
        dtype = a.dtype
        if self.scales is not None:
            a, a_scale = quantize_rows(a, column_major=False, name="input")
            scales = (a_scale, self.scales[number - 1])
        problem = GemmProblem(
            a.dtype,
            b.dtype,
            dtype,
            rows=rows.row_token.numel(),
            columns=b.shape[1],
            k=b.shape[2],
            batches=b.shape[0],
            scale="none" if scales is None else "block",
            groups="offsets",
            activation=self.activation if first else "identity",
            gathers=first,
        )
        columns = problem.columns // 2 if problem.gated else problem.columns
        out = a.new_empty((problem.rows, columns), dtype=dtype)
        index = (rows.offsets, None, rows.row_token if first else None, None)
        return launch(
            problem,
            f"fc{number}",
            out,
            a,
            b,
            scales,
            bias=self.biases[number - 1],
            rows=index,
            gate=self.gate if problem.gated else None,
            enable_pdl=enable_pdl,
        )
