"""The experts of a mixture: two grouped products between a map of rows and a sum.

Products read tokens through the map, so no copy of the input is made. The first one applies bias
and activation to its sums, and quantises them where the second one reads 8 bits. Its result has a
row for each chosen expert, the second one's too, and `combine` adds up a token's rows in the order
of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..gemm._choice import GemmProblem
from ..gemm._launch import STARTS_EARLY, launch
from ..gemm._tuning import is_tuning
from ..jit.gemm import GATED
from ..quantization._kernels import quantize_rows
from . import four_bit, one_token
from .maps import RowMap, combine, map_rows
from .together import build_together
from .tuning import compute_batches
from .workspace import MixtureShape, allocate


@dataclass(frozen=True)
class Experts:
    """The weights of the experts that are here.

    Attributes
    ----------
    fc1 : torch.Tensor
        ``[experts, columns, hidden]``, bfloat16, float16, float8_e4m3fn, or two codes a byte in
        uint8; columns are twice the intermediate size where the activation is gated.
    fc2 : torch.Tensor
        ``[experts, hidden, intermediate]``, dtype of `fc1`.
    activation : str
        An activation of `GemmConfig`.
    scheme : {"none", "tensor", "block", "four_bit"}
        How 8-bit operands are scaled: ``"tensor"`` by factors of whole tensors, ``"block"`` by one
        for 128 elements of a row and for 128 by 128 elements of a weight. ``"four_bit"``: weights
        alone have codes.
    scales : tuple of torch.Tensor
        float32. For tensors: factors of the sums of the first product, of what it gives before it
        is rounded to 8 bits, and of the sums of the second one, each with one element or
        ``[experts]``. For blocks: ``[experts, columns / 128, hidden / 128]`` and
        ``[experts, hidden / 128, intermediate / 128]``. For 4 bits as `four_bit.check_scales` says.
    biases : (torch.Tensor or None, torch.Tensor or None)
        ``[experts, columns]`` and ``[experts, hidden]``, dtype of the activations; none with
        8-bit weights.
    gate : tuple, optional
        alpha, beta and limit of the gated activation: numbers or ``[experts]``, float32.
    first_expert : int
        The number of the first expert.
    all_experts : int, optional
        Experts everywhere: what the tiles are chosen for. Those that are here if None.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    activation: str
    scheme: str = "none"
    scales: tuple[torch.Tensor, ...] = ()
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    gate: tuple[Any, Any, Any] | None = None
    first_expert: int = 0
    all_experts: int | None = None

    def run(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tune_max_num_tokens: int = 8192,
    ) -> torch.Tensor:
        """The sum of the chosen experts' results.

        Parameters
        ----------
        x : torch.Tensor
            ``[tokens, hidden]``, bfloat16 or float16; float8_e4m3fn for the scheme ``"tensor"``.
        chosen : torch.Tensor
            ``[tokens, top_k]``, int32 or int64: experts; those that are not here count nothing.
        weights : torch.Tensor
            ``[tokens, top_k]``, float32.
        out : torch.Tensor
            ``[tokens, hidden]``, bfloat16 or float16: receives the result.
        workspace : torch.Tensor, optional
            Memory of `workspace_bytes`; new memory if None.
        enable_pdl : bool, optional
            Programmatic dependent launch; None takes it where the device has it.
        tune_max_num_tokens : int
            Largest batch that is tuned beforehand, within ``autotune()``.
        """
        if self.scheme != "four_bit" and is_tuning():
            self._tune(x, chosen, out, enable_pdl, tune_max_num_tokens)
        return self._compute(x, chosen, weights, out, workspace, enable_pdl)

    def _tune(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        out: torch.Tensor,
        enable_pdl: bool | None,
        most: int,
    ) -> None:
        """Compute batches of other sizes for the tuner."""
        everywhere = self.all_experts or self.fc1.shape[0]
        types = (x.dtype, self.fc1.dtype, out.dtype, self.scheme, self.activation)
        kind = (self.fc1.shape, self.fc2.shape, types, everywhere, chosen.shape[1])

        def compute(
            x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
        ) -> None:
            self._compute(x, chosen, weights, out, None, enable_pdl)

        def products(tokens: int) -> tuple[GemmProblem, GemmProblem]:
            return self._problems(tokens * chosen.shape[1], x.dtype, out.dtype)

        compute_batches(kind, compute, products, x, chosen, out, everywhere, most)

    def _compute(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> torch.Tensor:
        """`run`, whose products ask the tuner alone."""
        experts, hidden, intermediate = self.fc2.shape
        if self.scheme == "four_bit":
            intermediate *= 2
        tokens, top_k = chosen.shape
        shape = MixtureShape(
            tokens, top_k, experts, hidden, intermediate, x.dtype, out.dtype, self.scheme
        )
        buffers = allocate(shape, workspace, x.device)
        x_scale, hidden_scale = None, buffers.get("hidden_scale")
        if self._is_plain and one_token.takes(x, out, self.fc1, self.fc2, top_k):
            weights_of_both, at = (self.fc1, self.fc2), self.first_expert
            return one_token.multiply(
                out, buffers["hidden"], x, *weights_of_both, chosen, weights, at, enable_pdl
            )
        rows = RowMap(buffers["offsets"], buffers["row_token"], buffers["entry_row"])
        first, second = self._problems(tokens * top_k, x.dtype, out.dtype)
        if self.scheme != "four_bit" and x.is_cuda:
            build_together(first, second, x.dtype, chosen.dtype)
        map_rows(chosen, self.first_expert, experts, enable_pdl, rows)
        if self.scheme == "block":
            codes = buffers["input"], buffers["input_scale"]
            x, x_scale = quantize_rows(x, name="input", out=codes, enable_pdl=enable_pdl)
        if self.scheme == "four_bit":
            self._multiply_four_bit(buffers["rows"], buffers["hidden"], x, rows, enable_pdl)
        else:
            between = buffers["hidden"], hidden_scale
            self._first(first, between, x, x_scale, rows, enable_pdl)
            self._second(second, buffers["rows"], between, rows, enable_pdl)
        combine(
            out,
            buffers["rows"],
            rows.entry_row,
            weights,
            enable_pdl,
            # Between the map and the second product stands the first one.
            starts_early=self.scheme != "four_bit",
        )
        return out

    @property
    def _is_plain(self) -> bool:
        """Whether there are but weights and a gate by SiLU."""
        return (
            self.activation == "swiglu_gate_last"
            and self.scheme == "none"
            and self.gate is None
            and self.biases == (None, None)
        )

    def _multiply_four_bit(
        self,
        out: torch.Tensor,
        hidden: torch.Tensor,
        x: torch.Tensor,
        rows: RowMap,
        enable_pdl: bool | None,
    ) -> None:
        """Both products, with weights that are unpacked on the way."""
        here = self.fc1.shape[0]
        part = here / (self.all_experts or here)
        four_bit.multiply(
            0,
            hidden,
            x,
            self.fc1,
            self.scales,
            self.biases[0],
            rows,
            here_of_all=part,
            activation=self.activation,
            gate=self.gate,
            enable_pdl=enable_pdl,
        )
        four_bit.multiply(
            1,
            out,
            hidden,
            self.fc2,
            self.scales,
            self.biases[1],
            rows,
            here_of_all=part,
            enable_pdl=enable_pdl,
        )

    def _first(
        self,
        problem: GemmProblem,
        out: tuple[torch.Tensor, torch.Tensor | None],
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        rows: RowMap,
        enable_pdl: bool | None,
    ) -> None:
        """The gathered product, activated and quantised; `out`: its rows and their scales."""
        scales: tuple[torch.Tensor | None, ...] | None = None
        if self.scheme == "block":
            scales = (x_scale, self.scales[0], out[1])
        elif self.scheme == "tensor":
            scales = (None, self.scales[0], self.scales[1])
        launch(
            problem,
            "fc1",
            out[0],
            x,
            self.fc1,
            scales,
            bias=self.biases[0],
            rows=(rows.offsets, None, rows.row_token, None),
            gate=self.gate if self.activation in GATED else None,
            # The map is ready where the quantisation runs between it and this product.
            layout=STARTS_EARLY if self.scheme == "block" else 0,
            enable_pdl=enable_pdl,
        )

    def _second(
        self,
        problem: GemmProblem,
        out: torch.Tensor,
        hidden: tuple[torch.Tensor, torch.Tensor | None],
        rows: RowMap,
        enable_pdl: bool | None,
    ) -> None:
        """The product of each row of `hidden`, which are rows and their scales."""
        scales: tuple[torch.Tensor | None, ...] | None = None
        if self.scheme == "block":
            scales = (hidden[1], self.scales[1])
        elif self.scheme == "tensor":
            scales = (None, self.scales[2])
        launch(
            problem,
            "fc2",
            out,
            hidden[0],
            self.fc2,
            scales,
            bias=self.biases[1],
            rows=(rows.offsets, None, None, None),
            layout=STARTS_EARLY,
            enable_pdl=enable_pdl,
        )

    def _problems(
        self, rows: int, dtype: torch.dtype, dtype_out: torch.dtype
    ) -> tuple[GemmProblem, GemmProblem]:
        """Both products of `rows` choices of tokens of `dtype`."""
        code = self.fc1.dtype if self.scheme in ("tensor", "block") else dtype
        first = self._problem(rows, code, self.fc1, code, self.activation, gathers=True)
        return first, self._problem(rows, code, self.fc2, dtype_out)

    def _problem(
        self,
        rows: int,
        dtype: torch.dtype,
        b: torch.Tensor,
        dtype_out: torch.dtype,
        activation: str = "identity",
        gathers: bool = False,
    ) -> GemmProblem:
        """The product of `rows` choices of experts anywhere with the weights `b`."""
        here, everywhere = b.shape[0], self.all_experts or b.shape[0]
        return GemmProblem(
            dtype,
            b.dtype,
            dtype_out,
            rows=max(rows * here // everywhere, 1),  # that are here on average
            columns=b.shape[1],
            k=b.shape[2],
            batches=here,
            routed=True,
            scale="block" if self.scheme == "block" else "none",
            groups="offsets",
            activation=activation,
            gathers=gathers,
        )
