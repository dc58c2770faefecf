"""What a command logs: nothing that other packages only say to each other, colours for terminals.

Nothing here runs at import; commands call it.
"""

from __future__ import annotations

import logging
import os
from typing import TextIO


def drop_known_noise() -> None:
    """Drop warnings of other packages that no user can act on; called first by every command."""
    # Importing torchao 0.18 registers two enums that torch 2.14 knows by itself, and torch says so
    # twice: in every run, since torchtitan imports torchao where it is installed. It can go once
    # torchao no longer registers them.
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_known_enum)


def _is_no_known_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass and is now natively supported" not in record.getMessage()


def takes_colours(stream: TextIO) -> bool:
    """Return whether colour codes may be written: a terminal, and NO_COLOR unset or empty.

    Args:
        stream: Where the log goes.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR")
