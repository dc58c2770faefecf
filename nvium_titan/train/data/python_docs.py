"""The demo corpus `python_docs`: English and code that every Python installation has.

The language reference (`pydoc_data.topics`) and the documented signatures of the standard library,
read from the installed sources with `ast`; no module of it is imported, nothing is downloaded.
CPython 3.11: 2.2 MB in 646 documents, read in 2 s on one core.
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
"""A module's documentation is cut into documents of at least this length."""
MIN_CHARS = 200
"""Shorter documents are left out."""

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
            f"corpus 'python_docs': no sources in {sysconfig.get_path('stdlib')}: this Python has "
            "none installed; set [dataloader] path to a text file of yours"
        )
    return tuple(documents)


def _topics() -> Iterator[str]:
    try:
        # A module of 0.7 MB that is one dictionary of strings.
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
    """Yield what is documented in `node`: signature and docstring, as they stand in the source."""
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
