"""Between text and tokens: the tokenizer of a folder, or bytes; text of a stream as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from .files import read_json

BYTE_LEVEL_EOS = 256
BYTE_LEVEL_VOCABULARY = 257
BYTE_LEVEL_FILE = "byte_level.json"


class Tokenizer(Protocol):
    """Interface that the engine needs of a tokenizer."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special`: with what the model has around a prompt, such as BOS."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""

    def piece(self, token: int) -> bytes:
        """Bytes of a token, perhaps part of a character; of a special one its name."""

    def for_grammars(self, eos: Sequence[int], vocabulary: int) -> Any:
        """The tokens as an ``LLTokenizer`` of llguidance; `eos`: what ends a text."""


class ByteTokenizer:
    """UTF-8 bytes are tokens 0 to 255; others have no text."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """One token per byte, nothing around them."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """A byte, or the name of what is none."""
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def for_grammars(self, eos: Sequence[int], vocabulary: int) -> Any:
        """`vocabulary`: with what the model has beyond bytes."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Bytes(vocabulary, eos)), eos_token=list(eos))


class _Bytes:
    """Interface that llguidance needs of a tokenizer."""

    def __init__(self, vocabulary: int, eos: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.special_token_ids = list(range(256, vocabulary))
        self.tokens = [ByteTokenizer().piece(token) for token in range(vocabulary)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class FileTokenizer:
    """``tokenizer.json``, read by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise ValueError(f"{path} needs the tokenizers library: pip install tokenizers") from (
                error
            )
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library has no other class for it
            raise ValueError(f"{path} must be a tokenizer: {error}") from error
        self._pieces: Any = None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """`special`: with the tokens that the file adds to a prompt. Those in `text` count too."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens are left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def piece(self, token: int) -> bytes:
        """Undone is whatever the file does to spaces and bytes; needs llguidance."""
        if self._pieces is None:
            # An end-of-text token is asked for, and of no effect here.
            self._pieces = self.for_grammars([0], self._tokenizer.get_vocab_size())
        return self._pieces.decode_bytes([token])

    def for_grammars(self, eos: Sequence[int], vocabulary: int) -> Any:
        """`vocabulary`: with what the model has beyond the tokens of the file."""
        from llguidance import LLTokenizer

        # Padding and truncation are for batches of texts.
        source = self._tokenizer.from_str(self._tokenizer.to_str())
        source.no_padding()
        source.no_truncation()
        return LLTokenizer(source.to_str(), n_vocab=vocabulary, eos_token=list(eos))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder.

    Raises
    ------
    ValueError
        If there is none that can be read.
    """
    path = folder / BYTE_LEVEL_FILE
    if path.is_file():
        if read_json(path) != {"eos": BYTE_LEVEL_EOS}:
            raise ValueError(f"{path} must be {{'eos': {BYTE_LEVEL_EOS}}}")
        return ByteTokenizer()
    path = folder / "tokenizer.json"
    if path.is_file():
        return FileTokenizer(path)
    raise ValueError(f"`model` must have a tokenizer.json or {BYTE_LEVEL_FILE}, got {folder}")


class TextStream:
    """Text of a growing list of tokens, in pieces that never have to be taken back.

    A token may be part of a character, and its text may depend on the one before it. Only the
    tokens after the last piece, and that piece's, are decoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens of the last piece, then those without text so far
        self._said = 0  # tokens of the last piece

    def push(self, token: int, last: bool = False) -> str:
        """Text that `token` completes; if it is the last, whatever is left."""
        self._window.append(token)
        before = self._tokenizer.decode(self._window[: self._said])
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd") and not last and len(self._window) - self._said < 8:
            return ""  # perhaps the beginning of a character, which has at most 4 bytes
        del self._window[: self._said]
        self._said = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        """Text of tokens that were held back."""
        before = self._tokenizer.decode(self._window[: self._said])
        return self._tokenizer.decode(self._window)[len(before) :]
