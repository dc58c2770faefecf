"""Streams of text: ids go in one by one, whole characters come out.

Bytes that are not UTF-8 come out as U+FFFD, as does an incomplete character at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override


class TextStream(Protocol):
    """Turns ids into text one by one; every piece of text is valid UTF-8."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes: a piece of a word, or nothing yet.

        Raises:
            TokenizerError: If the tokenizer has no such id.
        """
        ...

    def finish(self) -> str:
        """Return the rest: U+FFFD for an incomplete character, else nothing."""
        ...


class ByteStream(TextStream):
    """A stream for tokenizers in which every id stands for bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._strip_first_space = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @override
    def push(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        if data and self._strip_first_space:
            self._strip_first_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    @override
    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream(TextStream):
    """A stream for tokenizers that decode only lists: for each id it decodes a short window twice.

    Text that ends in U+FFFD is held back, since more ids may complete the character.
    """

    def __init__(
        self, token_text: Callable[[list[int]], str], is_text: Callable[[int], bool]
    ) -> None:
        self._token_text = token_text
        self._is_text = is_text
        self._window: list[int] = []
        self._num_shown = 0

    @override
    def push(self, token_id: int) -> str:
        if not self._is_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return text

    @override
    def finish(self) -> str:
        text = self._pending()
        self._num_shown = len(self._window)
        return text

    def _pending(self) -> str:
        shown = self._token_text(self._window[: self._num_shown])
        return self._token_text(self._window)[len(shown) :]
