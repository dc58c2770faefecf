"""Choosing kernels, and compiling the native ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvium_titan.decode import DecoderParams, Engine
from nvium_titan.decode.forward.native.build import load_library
from nvium_titan.decode.forward.native.forward import NativeForward
from nvium_titan.decode.forward.torch import TorchForward
from nvium_titan.errors import DependencyError
from tests.helpers.tiny_decoder import tiny_config


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty compilation cache, and no library loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path / "nvium_titan"
    load_library.cache_clear()


def params(dtype: torch.dtype = torch.float32) -> DecoderParams:
    return DecoderParams.random(tiny_config(), seed=0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_cpu_takes_the_native_kernels(dtype: torch.dtype) -> None:
    assert isinstance(Engine(params(dtype)).forward, NativeForward)


def test_other_types_take_torch() -> None:
    assert isinstance(Engine(params(torch.float64)).forward, TorchForward)
    assert isinstance(Engine(params(), kernels="torch").forward, TorchForward)


def test_native_kernels_that_cannot_run_are_refused_with_the_reason() -> None:
    with pytest.raises(DependencyError, match=r"cpu, torch\.float64; use kernels='auto'"):
        Engine(params(torch.float64), kernels="native")
    with pytest.raises(DependencyError, match="kernels='graph' run on CUDA, not on cpu"):
        Engine(params(), kernels="graph")


def test_kernels_are_compiled_once(fresh_cache: Path) -> None:
    Engine(params())
    (library,) = fresh_cache.iterdir()
    made = library.stat().st_mtime_ns
    load_library.cache_clear()
    Engine(params())
    assert [file.stat().st_mtime_ns for file in fresh_cache.iterdir()] == [made]


def test_without_a_compiler_torch_decodes_the_same_tokens(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_kernels = Engine(params()).generate([1, 2], max_new_tokens=8).result()
    load_library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        engine = Engine(params())
    assert isinstance(engine.forward, TorchForward)
    assert "no C compiler (no-such-compiler)" in caplog.text
    assert engine.generate([1, 2], max_new_tokens=8).result().token_ids == with_kernels.token_ids
    with pytest.raises(DependencyError, match="install one"):
        Engine(params(), kernels="native")


def test_a_compiler_that_fails_is_quoted(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho cannot compile today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(DependencyError, match="cannot compile today"):
        Engine(params(), kernels="native")
    assert not list(fresh_cache.iterdir())


def test_an_unwritable_cache_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    load_library.cache_clear()
    assert isinstance(Engine(params(), kernels="native").forward, NativeForward)
    load_library.cache_clear()
