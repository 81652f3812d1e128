"""Products with weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import kernels

FP8_MAX = 448.0
BLOCK = 128
"""Elements along a side of what shares a scale."""
LARGE = 1 << 26
"""Elements of a matrix beyond which cuBLAS multiplies a row faster than the kernel for one."""
FEW = 8
"""Rows for which the package has products with what follows them, and faster ones than cuBLAS."""
LEAST = 1 << 24
"""Elements of a matrix from which on these are known to be faster."""
_HEADS, _ROUTE = "add_rmsnorm_mm_rope_append_bf16", "add_rmsnorm_mm_route_bf16"


class Product(Protocol):
    """``x @ W.T + bias`` for rows of 16 bits, whatever format the weights have."""

    @property
    def inputs(self) -> int:
        """Columns of `x`."""

    def __call__(self, x: Any) -> torch.Tensor: ...


@dataclass
class Codes:
    """Rows of 8 bits with a scale for each 128 elements, which products of `Fp8Blocks` take.

    Attributes
    ----------
    numbers : torch.Tensor
        ``[rows, columns]`` float8_e4m3fn.
    scales : torch.Tensor
        ``[rows, columns / 128]`` float32.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def empty(rows: int, columns: int, device: torch.device) -> tuple[Codes, torch.Tensor]:
        """Codes for a kernel to write, and their scales as norms write them: a column's are
        neighbours, padded to a multiple of four."""
        numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
        shape = columns // BLOCK, -(-rows // 4) * 4
        padded = torch.empty(shape, dtype=torch.float32, device=device)
        return Codes(numbers, padded[:, :rows].t()), padded

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass
class Sum:
    """A row that products of 16-bit weights take instead of the norm of ``x + residual``.

    The first of them computes the norm, too: see `Linear`.

    Attributes
    ----------
    x, residual : torch.Tensor
        ``[1, columns]``.
    weight, eps : torch.Tensor and float
        The norm's.
    total, normed : torch.Tensor
        Sum and norm, once the product has been computed.
    """

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    eps: float

    def __post_init__(self) -> None:
        self.total, self.normed = torch.empty_like(self.x), torch.empty_like(self.x)

    def norm_of(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first arguments of the products with `weight` that compute the norm."""
        return self.x, self.residual, self.weight, weight

    @property
    def outs(self) -> dict[str, torch.Tensor]:
        """Where these leave sum and norm."""
        return {"residual_out": self.total, "normed_out": self.normed}

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class Linear:
    """Weights of 16 bits.

    The matrix is ``[inputs, outputs]``, the other way round than in checkpoints: cuBLAS has faster
    kernels for these, and for few rows the package has kernels that load weights before the
    kernel before ends (docs/tuning/serving_step.md).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return len(self.weight)

    @functools.cached_property
    def takes_sums(self) -> bool:
        """Whether one row may be a `Sum`."""
        name = "add_rmsnorm_mm_bf16"
        fits = self._is_ready and not self._is_few and self.inputs <= 4096
        return fits and hasattr(kernels.gemm, name)

    def makes_heads(self, dim: int) -> bool:
        """Whether `heads` knows heads of `dim` elements."""
        return self.takes_sums and dim in (64, 128) and hasattr(kernels.gemm, _HEADS)

    def heads(self, x: Sum, *args: Any, **options: Any) -> torch.Tensor:
        """Queries of a `Sum`, turned, with keys and values in the cache."""
        row, options = x.norm_of(self.weight), {**x.outs, **options}
        product = getattr(kernels.gemm, _HEADS)
        made = product(*row, *args, bias=self.bias, eps=x.eps, **options, weight_ready=True)
        return made[0]

    @property
    def routes(self) -> bool:
        """Whether `route` takes its results for logits of experts."""
        few = self.weight.shape[1] <= 128
        return self.takes_sums and few and hasattr(kernels.gemm, _ROUTE)

    def route(self, x: Sum, chosen: int, renormalize: bool) -> tuple[torch.Tensor, ...]:
        """Weights and numbers of experts for a `Sum`, and their logits."""
        row = *x.norm_of(self.weight), chosen, self.bias, x.eps, renormalize
        return getattr(kernels.gemm, _ROUTE)(*row, **x.outs, weight_ready=True)[:3]

    def __call__(self, x: torch.Tensor | Sum) -> torch.Tensor:
        if isinstance(x, Sum):
            row = *x.norm_of(self.weight), self.bias, x.eps
            return kernels.gemm.add_rmsnorm_mm_bf16(*row, **x.outs, weight_ready=True)[0]
        if len(x) == 1 and self._is_ready:
            product = kernels.gemm.mm_bf16
            return product(x.contiguous(), self.weight, self.bias, pdl=True, **_ready(product))
        if 1 < len(x) <= FEW and self._is_few and self.weight.numel() <= LARGE:
            return kernels.gemm.mm_bf16(x.contiguous(), self.weight, pdl=True, weight_ready=True)
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)

    def gates(self, rows: int) -> bool:
        """Whether `gated` is known to be faster than a product and an activation."""
        is_large = self.weight.numel() > LARGE and self.weight.shape[1] % 128 == 0
        return rows <= FEW and self._is_few and is_large

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(first half) * second half`` of the product."""
        product = kernels.gemm.mm_silu_and_mul_bf16
        return product(x.contiguous(), self.weight, weight_ready=True)

    def adds_norm(self, rows: int) -> bool:
        """Whether `add_norm` is known to be faster than a product and a norm."""
        columns = self.weight.shape[1]
        return rows <= FEW and self._is_few and columns % 256 == 0 and columns <= 4096

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """In place ``residual += x @ W.T``; its norm."""
        row = x.contiguous(), self.weight, residual, weight, eps
        return kernels.gemm.mm_add_rmsnorm_bf16(*row, weight_ready=True)

    @functools.cached_property
    def _is_few(self) -> bool:
        """Whether the package multiplies few rows with such weights faster than cuBLAS."""
        inputs, outputs = self.weight.shape
        return (
            is_hopper(self.weight.device)
            and self.weight.dtype == torch.bfloat16
            and self.bias is None
            and inputs % 16 == 0
            and inputs <= 1 << 15
            and outputs % 64 == 0
            and self.weight.numel() >= LEAST
            and hasattr(kernels.gemm, "mm_add_rmsnorm_bf16")
        )

    @functools.cached_property
    def _is_ready(self) -> bool:
        """Whether the package multiplies a row with such weights, and faster than cuBLAS."""
        return (
            is_hopper(self.weight.device)
            and self.weight.dtype == torch.bfloat16
            and all(size % 8 == 0 and size <= 1 << 15 for size in self.weight.shape)
            and self.weight.numel() <= LARGE
            and bool(_ready(kernels.gemm.mm_bf16))
        )


def takes_sums(product: Product) -> bool:
    """Whether a product takes a `Sum`."""
    return getattr(product, "takes_sums", False)


def sum_parts(
    product: Product, x: torch.Tensor, call: Callable[[Sum], Any] | None = None
) -> list[Callable[[], Any]]:
    """As `Body.parts`: the product of a `Sum` like `x`, by `call` if given, if there is one."""
    if len(x) != 1 or not takes_sums(product):
        return []
    return [lambda: (call or product)(Sum(x, x, x[0], 1.0))]


def norm_parts(product: Product, x: torch.Tensor, out: torch.Tensor) -> list[Callable[[], Any]]:
    """As `Body.parts`: the product with the norm after it, if there is one, for rows like `out`."""
    if not (isinstance(product, Linear) and product.adds_norm(len(x))):
        return []
    return [lambda: product.add_norm(x, out.clone(), out[0], 1.0)]


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device has the kernels for Hopper, and launches kernels early."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@dataclass
class Joined:
    """Products of the same input that no kernel does at once."""

    parts: list[Product]

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


@dataclass
class Fp8Rows:
    """8-bit weights with a scale for each row; activations are rounded to 8 bits, too.

    Attributes
    ----------
    weight : torch.Tensor
        ``[outputs, inputs]`` float8_e4m3fn.
    scale : torch.Tensor
        ``[outputs]`` float32.
    input_scale : torch.Tensor or None
        Scale of all activations; None: each row has its own, by its largest element.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        numbers = x.float()
        if self.input_scale is None:
            scale = numbers.abs().amax(-1).clamp(min=1e-12) / FP8_MAX
        else:
            scale = self.input_scale.expand(len(x)).contiguous()
        rounded = (numbers / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(self.weight.dtype)
        return kernels.gemm.fp8_linear(
            rounded, self.weight, scale, self.scale, self.bias, out_dtype=x.dtype
        )


@dataclass
class Fp8Blocks:
    """8-bit weights with a scale for each 128 by 128 elements.

    Activations are rounded to 8 bits by 128 elements of a row, here or by whoever made them.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor | Codes) -> torch.Tensor:
        product = kernels.gemm.fp8_blockscale_gemm_sm90
        if isinstance(x, Codes):
            out = product(x.numbers, self.weight, x.scales, self.scale, **_ready(product))
        else:
            rows = x.contiguous()
            out = product(rows, self.weight, weight_scale=self.scale, **_ready(product))
        return out if self.bias is None else out + self.bias


@functools.cache
def _ready(product: Callable[..., Any]) -> dict[str, bool]:
    """The argument that lets a product load weights early, if the package has it."""
    return {"weight_ready": True} if "weight_ready" in inspect.signature(product).parameters else {}


@dataclass
class Int4Groups:
    """4-bit weights with a scale for each group of columns of a row.

    Attributes
    ----------
    codes : torch.Tensor
        ``[outputs, inputs / 2]`` uint8, two's complement.
    scales : torch.Tensor
        ``[outputs, groups]``.
    offset : torch.Tensor or None
        ``[groups, outputs]``: what all weights of a group have on top; it multiplies the sums of
        the input's groups.
    order : torch.Tensor or None
        Which column of the input each column of the weights multiplies.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offset: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous() if self.order is None else x[:, self.order]
        out = kernels.gemm.weight_only_linear(x, self.codes, self.scales, "int4", bias=self.bias)
        if self.offset is not None:
            sums = x.unflatten(1, (len(self.offset), -1)).sum(-1, dtype=torch.float32)
            out += sums.to(x.dtype) @ self.offset
        return out
