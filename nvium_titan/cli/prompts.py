"""Prompts from a file, for `nvium generate --prompts-file`."""

from __future__ import annotations

import json
from pathlib import Path

from nvium_titan.errors import PromptError


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, in its order.

    A .jsonl file has an object per line, with the prompt under "prompt" or else "text"; in any
    other file each line is a prompt. Blank lines are skipped.

    Raises:
        PromptError: If the file cannot be read, has no prompt, or has a malformed line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PromptError(
            f"--prompts-file {path}: cannot be read: {error.strerror}; give a file with a prompt "
            'per line, or a .jsonl with rows like {"prompt": "..."}'
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError(f"--prompts-file {path}: {error}; save it as UTF-8") from error
    is_jsonl = path.suffix == ".jsonl"
    prompts = [
        _prompt_of(line, where=f"{path}:{number}") if is_jsonl else line.removesuffix("\r")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"--prompts-file {path}: no line has a prompt")
    return prompts


def _prompt_of(line: str, *, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON: {error}") from error
    prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise PromptError(f'{where}: expected an object with a text under "prompt" or "text"')
    return prompt
