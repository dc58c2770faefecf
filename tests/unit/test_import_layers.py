"""Who may import what, and that importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "nvium_titan"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "train_configs" not in path.parts)

# Bottom up: an entry of the package may import entries of the rows above its own.
LAYERS = (
    ("errors", "files", "logs"),
    ("core", "text", "report"),
    ("bundle",),
    ("decode",),
    ("convert",),
    ("train", "eval"),
    ("bench", "config_registry"),
    ("cli",),
)
MOST_ENTRIES = 16
MOST_EDGES = 60
WITHOUT_TORCHTITAN = ("core", "text", "bundle", "decode", "report", "convert", "eval")
WITHOUT_TORCH = ("text", "report")

IN_A_FRESH_PROCESS = """
import importlib, logging, sys, warnings

BLOCKED = {blocked!r}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())

def switches():
    if "torch" in BLOCKED:
        return None
    import torch
    assert not torch.cuda.is_initialized()
    return (
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(), list(logging.getLogger().handlers),
    )

before = switches()
warnings.filterwarnings("error", module="nvium_titan")  # other packages may warn
for name in {names!r}:
    importlib.import_module(name)
assert before == switches()
assert not [name for name in sys.modules if name.split(".")[0] in BLOCKED]
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in FILES}


def imported_modules(path: Path) -> Iterator[str]:
    """Give every module that a file imports, anywhere in it; submodules by their own names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in NAMES else node.module


def entry(name: str) -> str:
    """Return the file or folder of the package that a module is in; "" for the package itself."""
    return name.partition(".")[2].partition(".")[0]


def graph_of_entries() -> dict[str, set[str]]:
    """Return, for each file and folder of the package, those that it imports."""
    graph: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        ours = {entry(other) for other in imported_modules(path) if other.startswith("nvium_titan")}
        graph.setdefault(entry(name), set()).update(ours - {"", entry(name)})
    del graph[""]
    return graph


def test_the_package_is_few_folders_with_few_arrows_all_downwards() -> None:
    graph = graph_of_entries()
    for name, others in sorted(graph.items()):
        print(name, "->", " ".join(sorted(others)))
    edges = sum(map(len, graph.values()))
    print(f"{len(graph)} entries, {edges} edges")
    row = {name: index for index, names in enumerate(LAYERS) for name in names}
    assert sorted(graph) == sorted(row), "give every entry its row in LAYERS"
    upwards = [(a, b) for a, others in graph.items() for b in others if row[b] >= row[a]]
    assert not upwards
    assert len(graph) <= MOST_ENTRIES
    assert edges <= MOST_EDGES


def test_no_module_imports_itself_by_a_detour() -> None:
    def needs(name: str) -> set[str]:
        return {other for other in imported_modules(NAMES[name]) if other in NAMES} - {name}

    left: Mapping[str, set[str]] = {name: needs(name) for name in NAMES}
    while left:
        free = {name for name, others in left.items() if not others & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in free}


@pytest.mark.parametrize(
    "world", [("torchtitan", "transformers"), ("torch", "matplotlib")], ids=" ".join
)
def test_importing_needs_no_other_world_and_changes_nothing(world: tuple[str, ...]) -> None:
    folders = WITHOUT_TORCH if "torch" in world else WITHOUT_TORCHTITAN
    names = [
        name
        for name in NAMES
        if entry(name) in folders and not name.endswith(("triton_kernels", "hf_modeling_nvium"))
    ]
    assert len(names) > len(folders)
    result = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS.format(blocked=world, names=names)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("folder", [*WITHOUT_TORCHTITAN, "errors", "files", "logs"])
def test_only_training_names_torchtitan(folder: str) -> None:
    for name, path in NAMES.items():
        if entry(name) == folder:
            others = {other.split(".")[0] for other in imported_modules(path)}
            blocked = {"torchtitan"} | ({"transformers"} if folder == "decode" else set())
            assert not others & blocked, f"{name} imports {others & blocked}"


def test_public_names_of_decode_are_declared() -> None:
    import nvium_titan.decode as decode

    assert sorted(decode.__all__) == list(decode.__all__)
    assert all(hasattr(decode, name) for name in decode.__all__)
