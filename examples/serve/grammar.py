"""Answers that conform to a JSON schema: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from .tokens import Tokenizer

ANY_OBJECT = {"type": "object"}
"""A schema that every JSON object conforms to."""
MAX_SCHEMA_BYTES = 65536
# Any number of spaces, the library's default, lets a model write nothing else up to its limit.
_OPTIONS = {"whitespace_pattern": r"[ \n]{0,20}"}


class GrammarError(ValueError):
    """A schema that cannot be followed, with the reason."""


class Grammars:
    """Makes grammars for the tokens of a model.

    Parameters
    ----------
    tokenizer : Tokenizer
        The tokenizer of the model.
    eos : collection of int
        Tokens that end a text; at least one.
    vocabulary : int
        The tokenizer of the model.

    Raises
    ------
    GrammarError
        If the model has no end-of-text token, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int], vocabulary: int) -> None:
        if not eos:
            raise GrammarError("the model has no end-of-text token, with which an answer could end")
        try:
            import llguidance
        except ImportError as error:
            raise GrammarError('grammars need llguidance: pip install -e ".[serve]"') from error
        self._library = llguidance
        self._tokens = tokenizer.for_grammars(sorted(eos), vocabulary)

    def json(self, schema: dict[str, Any]) -> Grammar:
        """The JSON texts that conform to a schema, with up to 20 spaces or lines between values.

        Raises
        ------
        GrammarError
            If the schema is too long, wrong, or has what the library does not follow.
        """
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_BYTES:
            raise GrammarError(f"a schema must have at most {MAX_SCHEMA_BYTES} bytes as JSON")
        matcher = self._library.LLMatcher
        source = matcher.grammar_from_json_schema(text, _OPTIONS)
        made = matcher(self._tokens, source, log_level=0)
        if made.is_error():
            raise GrammarError(made.get_error().splitlines()[0])
        return Grammar(made)


class Grammar:
    """A compiled grammar; any number of answers can follow it at a time."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Matcher:
        """For a new answer."""
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        """A bit for each token that may come next, packed as `flashinfer.packbits` packs them.

        Returns
        -------
        torch.Tensor
            ``[bytes]`` uint8 on the host, bit order "little".
        """
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)

    def accept(self, token: int) -> None:
        """Go on by a token that has been drawn.

        Raises
        ------
        GrammarError
            If it is not allowed, or the grammar has become too complex.
        """
        if not self._matcher.consume_token(token):
            raise GrammarError(f"the answer left its grammar: {self._matcher.get_error()}")
