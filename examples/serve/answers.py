"""The JSON that answers OpenAI's completion requests."""

from __future__ import annotations

import time


def error_body(message: str, kind: str, param: str | None = None) -> dict:
    """JSON of an error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


class Answer:
    """The JSON objects that answer one request.

    Parameters
    ----------
    request_id, model : str
        As they appear in the answer.
    prompt_tokens : int
        Length of the prompt.
    chat : bool
        In the form of a chat completion.
    """

    def __init__(self, request_id: str, model: str, prompt_tokens: int, *, chat: bool):
        self.chat = chat
        self.prompt_tokens = prompt_tokens
        self.tokens = 0
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def _body(self, kind: str, choices: list[dict], usage: bool = False) -> dict:
        body = {**self._head, "object": kind, "choices": choices}
        if usage:
            body["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.tokens,
                "total_tokens": self.prompt_tokens + self.tokens,
            }
        return body

    def whole(self, text: str, reason: str | None) -> dict:
        """The whole answer."""
        choice: dict = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return self._body(kind, [choice], usage=True)

    def chunk(self, text: str, reason: str | None, *, first: bool) -> dict:
        """A piece of a streamed answer."""
        choice: dict = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            choice["text"] = text
        return self._body(self._stream_kind, [choice])

    def usage(self) -> dict:
        """The last piece of a stream, which counts the tokens."""
        return self._body(self._stream_kind, [], usage=True)

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"
