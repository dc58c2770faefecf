"""Streams of text: ids in one by one, whole characters out.

Bytes that are no UTF-8 come out as U+FFFD; an incomplete character at the end does when the stream
finishes.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol


class TextStream(Protocol):
    """Turns ids into text as they come; every piece is valid UTF-8."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, often a piece of a word, sometimes nothing.

        Raises:
            TokenizerError: If the tokenizer has no such id.
        """
        ...

    def finish(self) -> str:
        """Return what is left: U+FFFD for an incomplete character, else nothing."""
        ...


class ByteStream:
    """A stream for tokenizers whose every id is a string of bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._strip_first_space = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that the bytes of `token_id` complete."""
        data = self._token_bytes(token_id)
        if data and self._strip_first_space:
            self._strip_first_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return U+FFFD if the bytes end inside a character."""
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """A stream for tokenizers that only decode lists: decodes a short window twice per id.

    Text is held back while it ends in U+FFFD, which more ids may complete.
    """

    def __init__(
        self, token_text: Callable[[list[int]], str], is_text: Callable[[int], bool]
    ) -> None:
        self._token_text = token_text
        self._is_text = is_text
        self._window: list[int] = []
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        if not self._is_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return text

    def finish(self) -> str:
        """Return what was held back."""
        text = self._pending()
        self._num_shown = len(self._window)
        return text

    def _pending(self) -> str:
        shown = self._token_text(self._window[: self._num_shown])
        return self._token_text(self._window)[len(shown) :]
