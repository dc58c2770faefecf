"""Draw docs/nvium.svg: six tokens on their way through four blocks, and the rows they leave owed.

    python tools/draw_picture.py            writes docs/nvium.svg

The exits are given; which rows each block call holds follows from them, as in decoding: a token
that enters a block takes every row with it that is still owed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "nvium.svg"

NUM_BLOCKS = 4
LAYERS_PER_BLOCK = 6
WORDS = ("The", "cat", "sat", "on", "the", "mat", ".")
EXITS = (2, 1, 1, 1, 3, 1)
"""The exit, from 1, at which each word is followed by the next."""

WIDTH, HEIGHT = 840, 530
MODEL_X, MODEL_WIDTH = 40, 150
GRID_X, STEP_X = 330, 88
BLOCK_HEIGHT, STEP_Y = 44, 88
BOTTOM_Y = 392
"""The middle of the lowest block."""

# Colours of GitHub's light and dark pages, on a card of their own, so that the picture can be read
# where page and browser disagree.
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
  .card { fill: #ffffff; stroke: #d1d9e0 }
  .block { fill: #eef1f4; stroke: #818b98 }
  .line { stroke: #818b98; fill: none; stroke-width: 1.5 }
  .arrow { fill: #818b98 }
  .junction { fill: #fff1c5; stroke: #9a6700; stroke-width: 1.5 }
  .call { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5 }
  .now { fill: #0969da; stroke: #0969da }
  .paid { fill: #ffffff; stroke: #0969da; stroke-width: 2.5 }
  .owed { fill: none; stroke: #818b98; stroke-width: 1.5; stroke-dasharray: 3 3 }
  .exit { fill: #fff1c5; stroke: #9a6700; stroke-width: 1.5 }
  .quiet { fill: #59636e }
  .left { text-anchor: start }
  .strong { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .card { fill: #0d1117; stroke: #3d444d }
    .block { fill: #212830; stroke: #9198a1 }
    .line { stroke: #9198a1 }
    .arrow { fill: #9198a1 }
    .junction, .exit { fill: #3a2d08; stroke: #d29922 }
    .call { fill: #0c2d5e; stroke: #4493f8 }
    .now { fill: #4493f8; stroke: #4493f8 }
    .paid { fill: #0d1117; stroke: #4493f8 }
    .owed { stroke: #9198a1 }
    .quiet { fill: #9198a1 }
  }
"""


class Call(NamedTuple):
    """One run of a block's layers."""

    block: int
    """From 1."""
    first: int
    """The first of its rows."""
    last: int
    """The last one: the token that made the call."""


def block_calls() -> list[Call]:
    """Return every block call of the six tokens, in order."""
    num_filled = [0] * NUM_BLOCKS
    calls = []
    for token, exit_number in enumerate(EXITS):
        for block in range(1, exit_number + 1):
            calls.append(Call(block, num_filled[block - 1], token))
            num_filled[block - 1] = token + 1
    return calls


def picture() -> str:
    """Return the SVG text."""
    calls = block_calls()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>N-vium: tokens leave at junctions; owed rows are run with a later token</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        *_model(),
        *_calls(calls),
        *_tokens(),
        *_legend(calls),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _y(block: int) -> int:
    """Return the middle of a block, from 1."""
    return BOTTOM_Y - (block - 1) * STEP_Y


def _x(token: int) -> int:
    return GRID_X + token * STEP_X


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{text}</text>"


def _arrow(x: float, y: float, to_y: float) -> str:
    """Return a line upwards with a head on it."""
    return (
        f'<path class="line" d="M{x} {y}V{to_y + 6}"/>'
        f'<path class="arrow" d="M{x - 4} {to_y + 7}h8l-4 -8z"/>'
    )


def _model() -> Iterator[str]:
    """Yield the column on the left: blocks, junctions and exits."""
    middle = MODEL_X + MODEL_WIDTH / 2
    yield _text(middle, 30, "the model", "strong")
    for block in range(1, NUM_BLOCKS + 1):
        y, last = _y(block), block * LAYERS_PER_BLOCK
        is_top = block == NUM_BLOCKS
        yield (
            f'<rect class="block" x="{MODEL_X}" y="{y - BLOCK_HEIGHT / 2}" width="{MODEL_WIDTH}" '
            f'height="{BLOCK_HEIGHT}" rx="6"/>'
        )
        yield _text(middle, y - 2, f"block {block}")
        yield _text(middle, y + 15, f"layers {last - LAYERS_PER_BLOCK + 1} to {last}", "quiet")
        exit_y = y - STEP_Y / 2
        if not is_top:
            yield _arrow(middle, y - BLOCK_HEIGHT / 2, exit_y - STEP_Y / 2 + BLOCK_HEIGHT / 2 + 1)
            yield f'<path class="junction" d="M{middle} {exit_y - 10}l10 10l-10 10l-10 -10z"/>'
            yield f'<path class="line" d="M{middle + 10} {exit_y}H{MODEL_X + MODEL_WIDTH + 8}"/>'
        else:
            yield (
                f'<path class="line" d="M{middle} {y - BLOCK_HEIGHT / 2}V{exit_y}'
                f'H{MODEL_X + MODEL_WIDTH + 8}"/>'
            )
        yield _text(MODEL_X + MODEL_WIDTH + 14, exit_y + 5, f"exit {block}", "left")


def _calls(calls: list[Call]) -> Iterator[str]:
    """Yield a frame around the rows of each block call."""
    for block, first, last in calls:
        x, y = _x(first) - 20, _y(block) - 20
        yield (
            f'<rect class="call" x="{x}" y="{y}" width="{_x(last) + 20 - x}" height="40" rx="20"/>'
        )
    filled = {block: last for block, _, last in calls}
    for block in range(1, NUM_BLOCKS + 1):
        for token in range(len(EXITS)):
            if any(call.block == block and call.last == token for call in calls):
                kind = "now"
            else:
                kind = "paid" if token <= filled.get(block, -1) else "owed"
            yield f'<circle class="{kind}" cx="{_x(token)}" cy="{_y(block)}" r="9"/>'


def _tokens() -> Iterator[str]:
    """Yield the words that go in below, and at its exit the word that each of them gives."""
    yield _text((_x(0) + _x(len(EXITS) - 1)) / 2, 30, "six tokens, one after the other", "strong")
    for token, exit_number in enumerate(EXITS):
        x = _x(token)
        yield _text(x, BOTTOM_Y + 54, WORDS[token])
        yield _arrow(x, BOTTOM_Y + 38, BOTTOM_Y + 22)
        exit_y = _y(exit_number) - STEP_Y / 2
        yield f'<rect class="exit" x="{x - 22}" y="{exit_y - 13}" width="44" height="24" rx="12"/>'
        yield _text(x, exit_y + 4, WORDS[token + 1])


def _legend(calls: list[Call]) -> Iterator[str]:
    """Yield what the marks mean, and what the picture adds up to."""
    y = HEIGHT - 56
    for x, kind, meaning in (
        (50, "now", "the token itself"),
        (GRID_X, "paid", "an owed row, run in the same call"),
        (GRID_X + 320, "owed", "still owed"),
    ):
        yield f'<circle class="{kind}" cx="{x}" cy="{y - 5}" r="9"/>'
        yield _text(x + 18, y, meaning, "left")
    y += 34
    yield f'<path class="junction" d="M50 {y - 15}l10 10l-10 10l-10 -10z"/>'
    yield _text(68, y, "a junction: leave here or go on?", "left")
    dense = NUM_BLOCKS * len(EXITS)
    yield _text(
        GRID_X - 9, y, f"{len(calls)} block calls, where a dense model makes {dense}", "left strong"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
