"""The demo corpus `python_docs`: the documentation in every Python installation.

It is the language reference (`pydoc_data.topics`), and the signatures and docstrings of the
standard library, read from its sources without importing them. In CPython 3.11: 2.2 MB in 646
documents, read in 2 s on one core.
"""

from __future__ import annotations

import ast
import gc
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nvium_titan.errors import DataError

DOCUMENT_CHARS = 4000
"""The documentation of a module is cut into documents of at least this length."""
MIN_CHARS = 200
"""A shorter rest of a module is left out."""

# Tests, generated tables and other people's code: no prose.
_SKIPPED = {
    "dist-packages", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib",
    "pydoc_data", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


@cache
def python_docs() -> tuple[str, ...]:
    """Return the documents, in an order that depends only on the Python version.

    Raises:
        DataError: If this Python was installed without its sources and documentation.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # Syntax trees are many objects without cycles: collecting doubles the time.
    try:
        documents = dict.fromkeys([*_topics(), *_standard_library()])
    finally:
        if was_enabled:
            gc.enable()
    if not documents:
        raise DataError(
            f"corpus 'python_docs': this Python is installed without its sources (none in "
            f"{sysconfig.get_path('stdlib')}); set [dataloader] path to a text file of yours"
        )
    return tuple(documents)


def _topics() -> Iterator[str]:
    try:
        # One dictionary of strings, 0.7 MB: imported only when it is needed.
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield topics[name].strip() + "\n"


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in _sources(root):
        try:
            source = file.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        yield from _documents(module, tree, source.split("\n"))


def _sources(root: Path) -> Iterator[Path]:
    """Yield the public modules in a fixed order, without entering site-packages."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and name[0] != "_")
        for name in sorted(files):
            if name.endswith(".py") and (name[0] != "_" or name == "__init__.py"):
                yield Path(folder, name)


def _documents(module: str, tree: ast.Module, lines: list[str]) -> Iterator[str]:
    text = ""
    for entry in _entries(tree, lines):
        text += f"{entry}\n\n" if text else f"# {module}\n\n{entry}\n\n"
        if len(text) >= DOCUMENT_CHARS:
            yield text.rstrip() + "\n"
            text = ""
    if len(text) >= MIN_CHARS:
        yield text.rstrip() + "\n"


def _entries(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> Iterator[str]:
    """Yield signature and docstring of everything documented in `node`, as in the source."""
    first = node.body[0] if node.body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        start = first.lineno if isinstance(node, ast.Module) else node.lineno
        yield "\n".join(lines[start - 1 : first.end_lineno])
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _entries(child, lines)
