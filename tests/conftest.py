"""Fixtures shared by every test."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

# Before anything imports Hugging Face libraries: tests never go online.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

# A background job of a shell ignores Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("torchtitan") is not None:
    from nvium_titan.train.compat import use_cpu_without_accelerator

    use_cpu_without_accelerator()


# What the extras bring. A bare install has none of it and runs the tests that need none.
OPTIONAL = {"torchtitan", "torchdata", "spmd_types", "datasets", "pyarrow", "transformers"}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports a package of an extra where that is not installed."""
    report = yield
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr))
    if report.failed and missing and missing[1] in OPTIONAL:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}")
    return report


@pytest.fixture(autouse=True)
def _fixed_state() -> Iterator[None]:
    """Start every test from the same seed, and undo what it set for the process."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_flush_denormal(False)  # what training and evaluation set for their process
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of published test material (tokenizers, golden numbers, text)."""
    root = Path(__file__).resolve().parents[1]
    path = Path(os.environ.get("NVIUM_SHARED", root.parent / "shared"))
    if not path.is_dir():
        reason = f"test material not found at {path}; set NVIUM_SHARED to its folder"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Checkpoints and numbers of the N-vium authors' code; see its README."""
    return Path(__file__).resolve().parent / "data" / "golden"
