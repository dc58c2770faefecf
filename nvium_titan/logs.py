"""What commands keep out of their logs: other packages' noise, and colour codes in files."""

from __future__ import annotations

import logging
import os
from typing import TextIO


def drop_known_noise() -> None:
    """Drop warnings of other packages that no user can act on."""
    # torchao 0.18 registers two enums that torch 2.14 knows by itself, and torch warns of each.
    # Where torchao is installed torchtitan imports it, so every run would begin with that. This can
    # go once torchao no longer registers them.
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_known_enum)


def _is_no_known_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass and is now natively supported" not in record.getMessage()


def takes_colours(stream: TextIO) -> bool:
    """Return whether colour codes may be written: a terminal, and NO_COLOR unset or empty.

    Args:
        stream: Where the log goes.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR")
