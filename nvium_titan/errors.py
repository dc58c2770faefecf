"""The errors a user can cause, and the exit code each one maps to.

    NviumError                  1  (failed)
    |-- DivergenceError         1  the loss became NaN or infinite
    |-- StreamError             1  a stream of text keeps failing
    |-- SaveError               1  a checkpoint could not be saved
    `-- UsageError              2  (wrong use: the input must change)
        |-- ConfigError         2  a TOML file, a flag, a shape
        |-- DataError           2  text, jsonl, folders
        |-- TokenizerError      2  a tokenizer file, a vocabulary
        |-- CheckpointError     2  a DCP step folder
        |-- BundleError         2  a bundle directory
        |-- PromptError         2  a prompt or a request that the engine cannot serve
        |-- BenchError          2  a benchmark that cannot be run as asked
        `-- DependencyError     2  a missing or unsupported package

Every message names the value, the limit and the place to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NviumError(Exception):
    """Base of the errors that a command shows as one message, without a traceback."""

    exit_code = 1


class DivergenceError(NviumError):
    """The loss is NaN or infinite; the message names the step and the last good checkpoint."""


class StreamError(NviumError):
    """A stream of text, or the disk it is on, keeps failing; the run was saved before."""


class SaveError(NviumError):
    """A checkpoint could not be saved, on a full disk for example; earlier ones are kept."""


class UsageError(NviumError):
    """The input cannot work and must change."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, has the wrong type or is impossible."""


class DataError(UsageError):
    """Training or evaluation data is missing, empty or malformed."""


class TokenizerError(UsageError):
    """A tokenizer cannot be read, or its vocabulary does not fit the model."""


class CheckpointError(UsageError):
    """A training checkpoint is missing, incomplete or not ours."""


class BundleError(UsageError):
    """A bundle is missing, incomplete or of another format."""


class PromptError(UsageError):
    """A prompt or a generation request does not fit the engine."""


class BenchError(UsageError):
    """A benchmark cannot be run as asked: a shape, exit probabilities, a peer, its dtype."""


class DependencyError(UsageError):
    """A package is missing, or its version is not supported."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint with the nearest valid name and all valid names.

    Args:
        name: What the user wrote.
        valid: All names that would be accepted.

    Returns:
        Text to append to a message, such as `"; did you mean 'beta'? (valid: alpha, beta)"`.
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"{hint} (valid: {', '.join(names)})"
