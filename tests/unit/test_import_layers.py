"""Who may import what, and that importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "nvium_titan"
DECODE_WORLD = sorted(
    [
        *(PACKAGE / "core").glob("*.py"),
        *(PACKAGE / "decode").rglob("*.py"),
        *(PACKAGE / name for name in ("bundle.py", "errors.py", "exit_plan.py", "tokenizer.py")),
    ]
)
BLOCKED = ("torchtitan", "transformers")

IN_A_FRESH_PROCESS = """
import logging, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchtitan", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
def switches():
    return (
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(), list(logging.getLogger().handlers),
    )

before = switches()
import nvium_titan.core.mixture, nvium_titan.core.objective
import nvium_titan.decode
import nvium_titan.bundle
import nvium_titan.convert.load, nvium_titan.eval.perplexity
assert before == switches()
assert not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name.split(".")[0] in ("torchtitan", "transformers")]
"""


def imported_modules(path: Path) -> set[str]:
    """Return every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def test_decode_imports_without_torchtitan_and_changes_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", IN_A_FRESH_PROCESS],
        capture_output=True,
        text=True,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("path", DECODE_WORLD, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_decode_world_never_names_the_training_world(path: Path) -> None:
    for name in imported_modules(path):
        assert name.split(".")[0] not in BLOCKED, f"{path.name} imports {name}"
        training = ("model", "trainer", "loss", "data", "config", "compat", "validator", "metrics")
        assert not any(
            name == f"nvium_titan.{part}" or name.startswith(f"nvium_titan.{part}.")
            for part in training
        ), f"{path.name} imports {name}"


def test_core_imports_torch_and_nothing_of_decode() -> None:
    for path in (PACKAGE / "core").glob("*.py"):
        ours = {name for name in imported_modules(path) if name.startswith("nvium_titan")}
        assert all(name.startswith(("nvium_titan.core", "nvium_titan.exit_plan")) for name in ours)


def test_public_names_of_decode_are_declared() -> None:
    import nvium_titan.decode as decode

    assert sorted(decode.__all__) == list(decode.__all__)
    assert all(hasattr(decode, name) for name in decode.__all__)
