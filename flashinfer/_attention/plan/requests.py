"""What a batch is: the requests by their lengths, and the tensors that the launches read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .spec import AttentionSpec


class ArgumentNames:
    """A public function's names of its index tensors: positions in csrc/attention_requests.h."""

    DECODE, PREFILL, RAGGED, BATCH_ATTENTION, POD_PREFILL, POD_DECODE = range(6)


class Requests(NamedTuple):
    """Requests that attend to their own keys, and which of these they see.

    Request ``b`` has the query tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` and, paged, the
    entries ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` of the page numbers; ragged, these rows of k
    and v. Tensors are int32 vectors on the CPU. The native planner takes the fields in this order.

    Attributes
    ----------
    argument_names : int
        A member of ``ArgumentNames``, for errors.
    qo_indptr : torch.Tensor or None
        ``[batch_size + 1]``. None: each request has `tokens_per_request` tokens.
    kv_indptr : torch.Tensor
        ``[batch_size + 1]``.
    kv_len, last_page_len : torch.Tensor or None
        ``[batch_size]``, at least one of them for pages; given both, they must agree.
    page_size : int
        Tokens of a page; 0 for ragged keys.
    causal : bool
        Whether no query sees a key after its own position, which is aligned to the end.
    window_left : int
        How many keys before its own position a query sees; negative: all.
    """

    argument_names: int
    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor
    kv_len: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    page_size: int = 0
    tokens_per_request: int = 1
    causal: bool = False
    window_left: int = -1

    @property
    def batch_size(self) -> int:
        return self.kv_indptr.shape[0] - 1

    @property
    def num_qo_tokens(self) -> int:
        if self.qo_indptr is None:
            return self.batch_size * self.tokens_per_request
        return int(self.qo_indptr[-1])

    def qo_lengths(self) -> torch.Tensor:
        """Query tokens of each request, ``[batch_size]`` int32 on the CPU."""
        if self.qo_indptr is None:
            return torch.full((self.batch_size,), self.tokens_per_request, dtype=torch.int32)
        return self.qo_indptr.diff()

    def kv_lengths(self) -> torch.Tensor:
        """Key tokens of each request, ``[batch_size]`` int32 on the CPU."""
        if self.kv_len is not None:
            return self.kv_len
        pages = self.kv_indptr.diff()
        if self.last_page_len is None:
            return pages
        return torch.where(pages > 0, (pages - 1) * self.page_size + self.last_page_len, 0)

    def sees_no_more_than(self, planned: Requests) -> bool:
        """Whether a plan for `planned`, the same requests, visits every key that these see."""
        window = self.window_left
        return (self.causal or not planned.causal) and (
            planned.window_left < 0 or 0 <= window <= planned.window_left
        )


class DeviceLengths(NamedTuple):
    """Lengths of requests on the GPU, which a plan on the device reads: int32 vectors.

    Attributes
    ----------
    qo_indptr : torch.Tensor or None
        ``[batch_size + 1]`` rows of the queries; None: each request has the tokens that the
        `Requests` beside it say.
    kv_indptr : torch.Tensor or None
        ``[batch_size + 1]`` in page numbers; None: requests have equal shares of them.
    kv_len, last_page_len : torch.Tensor or None
        ``[batch_size]``, one of them.
    most_qo_len : int
        The most query tokens of a request.
    """

    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor | None
    kv_len: torch.Tensor | None
    last_page_len: torch.Tensor | None
    most_qo_len: int


class CustomMask(NamedTuple):
    """A mask of a bit for each query and key; it may show a query any key."""

    bits: torch.Tensor  # little-endian, [qo_len * kv_len] of each request from a new byte on; uint8
    indptr: torch.Tensor  # first byte of each request, int32
    # Ranges of the keys that queries see, [query tokens, 2] int32 on the CPU: the first key and the
    # one after the last. None: any key, as where the bits may change without a new plan.
    visible: torch.Tensor | None = None

    @property
    def mode(self) -> str:
        """As in ``AttentionConfig``."""
        return "custom"


class DraftMask(NamedTuple):
    """A mask of the requests' own queries, of which each has 32 at most; keys before are seen."""

    words: torch.Tensor  # [query tokens, 1] int32: bit i of a row for query i of its request

    @property
    def mode(self) -> str:
        """As in ``AttentionConfig``."""
        return "draft"


class ItemScoring(NamedTuple):
    """Multi-item scoring; see ``BatchPrefillWithPagedKVCacheWrapper.plan``."""

    prefix_len_ptr: torch.Tensor
    token_pos_in_items_ptr: torch.Tensor
    token_pos_in_items_len: int
    max_item_len_ptr: torch.Tensor

    @property
    def mode(self) -> str:
        """As in ``AttentionConfig``."""
        return "multi_item"


class PlanTensors(NamedTuple):
    """Tensors of a plan on the device, which launches read.

    Attributes
    ----------
    kv_indices : torch.Tensor or None
        Page numbers, int32; None for ragged keys.
    mask : CustomMask, DraftMask, ItemScoring or None
        Takes the place of causality.
    alibi_slopes : torch.Tensor or None
        ``[num_qo_heads]`` float32, with ``"ALIBI"``.
    rows_as_pages : bool
        The only request's keys are rows of k and v, which the kernel reads as pages that follow
        each other: the first set of a launch of two sets of tensors.
    """

    kv_indices: torch.Tensor | None = None
    mask: CustomMask | DraftMask | ItemScoring | None = None
    alibi_slopes: torch.Tensor | None = None
    rows_as_pages: bool = False


class AttentionProblem(NamedTuple):
    """What a plan is made for: what kernels, references and traces read."""

    spec: AttentionSpec
    requests: Requests
    tensors: PlanTensors

    @property
    def mask_mode(self) -> str:
        """Mask of the kernel, as in ``AttentionConfig``."""
        mask = self.tensors.mask
        return self.spec.mask_mode if mask is None else mask.mode

    def with_mask(self, mask: CustomMask | ItemScoring) -> AttentionProblem:
        """The same with a mask: a custom one may show any key, multi-item scoring no later one."""
        return AttentionProblem(
            self.spec,
            self.requests._replace(causal=isinstance(mask, ItemScoring)),
            self.tensors._replace(mask=mask),
        )
