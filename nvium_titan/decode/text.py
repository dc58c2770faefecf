"""Text over a generation of token ids: whole characters as they come, and stop strings.

The engine knows ids only. Text that may be the beginning of a stop string is held back until it is
clear that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nvium_titan.decode.results import Generation, GenerationResult
from nvium_titan.errors import PromptError
from nvium_titan.text_stream import TextStream


class TextResult(NamedTuple):
    """A finished text."""

    text: str
    """Everything before the stop string, or everything."""
    stop_string: str | None
    """The stop string that was met, if one was."""
    generation: GenerationResult
    """The tokens; they include those of the stop string."""


class TextGeneration(Iterator[str]):
    """Pieces of text as they come, none of them empty; `result()` runs to the end."""

    def __init__(
        self, generation: Generation, stream: TextStream, *, stop_strings: Sequence[str] = ()
    ) -> None:
        """Wrap a generation.

        Args:
            generation: Fresh; this object ends it where a stop string comes.
            stream: A fresh stream of the model's tokenizer.
            stop_strings: Texts that end the generation and are not part of it; where several match,
                the one that begins first counts.

        Raises:
            PromptError: If a stop string is empty.
        """
        if "" in stop_strings:
            raise PromptError("a stop string is empty; it would stop before the first character")
        self._generation = generation
        self._stream = stream
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self._pieces: list[str] = []
        self._stop_string: str | None = None
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
                self._held += self._stream.finish()
            else:
                self._held += self._stream.push(token.token_id)
            piece = self._release()
            if piece:
                self._pieces.append(piece)
                return piece
        raise StopIteration

    def _release(self) -> str:
        """Cut off the text that can no longer become part of a stop string."""
        matches = [
            (self._held.index(stop), stop) for stop in self._stop_strings if stop in self._held
        ]
        if matches:
            end, self._stop_string = min(matches)
            if not self._is_finished:
                self._generation.stop()
                self._is_finished = True
        elif self._is_finished:
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
        return piece

    def result(self) -> TextResult:
        """Return the whole text and the generation's result, after running what is left."""
        for _ in self:
            pass
        return TextResult("".join(self._pieces), self._stop_string, self._generation.result())
