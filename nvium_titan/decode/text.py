"""Text over a generation of token ids: whole characters as they come, and stop strings.

The engine knows ids only. Text that may be the beginning of a stop string is held back until it is
clear that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nvium_titan.decode.generation import Generation, GenerationResult
from nvium_titan.errors import PromptError
from nvium_titan.text.stream import TextStream


class TextResult(NamedTuple):
    """A finished text."""

    text: str
    """Everything before the stop string, or everything."""
    stop_string: str | None
    """The stop string that was met, if one was."""
    generation: GenerationResult
    """The tokens; they include those of the stop string."""


class TextPieces:
    """The text of one generation as its tokens come, up to a stop string."""

    def __init__(self, stream: TextStream, *, stop_strings: Sequence[str] = ()) -> None:
        """Begin with no text.

        Args:
            stream: A fresh stream of the model's tokenizer.
            stop_strings: Texts that end it and are not part of it; where several match, the one
                that begins first counts.

        Raises:
            PromptError: If a stop string is empty.
        """
        if "" in stop_strings:
            raise PromptError("a stop string is empty; it would stop before the first character")
        self.stop_string: str | None = None
        """The stop string that was met; nothing may be pushed after it."""
        self._stream = stream
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Return the text that is certain with this token, perhaps none."""
        self._held += self._stream.push(token_id)
        return self._release(is_last=False)

    def finish(self) -> str:
        """Return what is left after the last token; nothing after a stop string."""
        if self.stop_string is not None:
            return ""
        self._held += self._stream.finish()
        return self._release(is_last=True)

    def _release(self, *, is_last: bool) -> str:
        """Cut off the text that can no longer become part of a stop string."""
        matches = [
            (self._held.index(stop), stop) for stop in self._stop_strings if stop in self._held
        ]
        if matches:
            end, self.stop_string = min(matches)
        elif is_last:
            end = len(self._held)
        else:
            end = len(self._held) - max(
                (
                    size
                    for stop in self._stop_strings
                    for size in range(1, len(stop))
                    if self._held.endswith(stop[:size])
                ),
                default=0,
            )
        piece, self._held = self._held[:end], self._held[end:]
        self._pieces.append(piece)
        return piece


class TextGeneration(Iterator[str]):
    """Pieces of text as they come, none of them empty; `result()` runs to the end."""

    def __init__(
        self, generation: Generation, stream: TextStream, *, stop_strings: Sequence[str] = ()
    ) -> None:
        """Wrap a generation.

        Args:
            generation: Fresh; this object ends it where a stop string comes.
            stream: A fresh stream of the model's tokenizer.
            stop_strings: Texts that end it and are not part of it.

        Raises:
            PromptError: If a stop string is empty.
        """
        self._generation = generation
        self._pieces = TextPieces(stream, stop_strings=stop_strings)
        self._is_finished = False

    def __next__(self) -> str:
        """Return the next piece.

        Raises:
            StopIteration: After the last piece.
        """
        while not self._is_finished:
            token = next(self._generation, None)
            if token is None:
                self._is_finished = True
                piece = self._pieces.finish()
            else:
                piece = self._pieces.push(token.token_id)
                if self._pieces.stop_string is not None:
                    self._is_finished = True
                    self._generation.stop()
            if piece:
                return piece
        raise StopIteration

    def result(self) -> TextResult:
        """Return the whole text and the generation's result, after running what is left."""
        for _ in self:
            pass
        return TextResult(self._pieces.text, self._pieces.stop_string, self._generation.result())
