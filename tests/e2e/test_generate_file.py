"""`nvium generate --prompts-file` in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvium_titan.bundle import write_bundle
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.tiny_decoder import lively_tensors, tiny_config


@pytest.mark.e2e
@pytest.mark.cases
def test_dec_09_two_processes_give_the_same_answers(tmp_path: Path) -> None:
    """Also with other companions; float32."""
    config = tiny_config(vocab_size=264)
    bundle = tmp_path / "bundle"
    tensors = lively_tensors(config, router_gain=0.7)
    write_bundle(bundle, config=config, tensors=tensors, tokenizer=ByteTokenizer(), provenance={})

    def answer(prompts: list[str], *, batch: int) -> list[Any]:
        prompts_file = tmp_path / "prompts.txt"
        prompts_file.write_text("\n".join(prompts))
        words = ["generate", bundle, "--prompts-file", prompts_file, "--json", "--seed", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "nvium_titan.cli", *words, "--batch", str(batch)],
            check=True,
            capture_output=True,
            encoding="utf-8",
        )
        return [
            (record["prompt"], record["token_ids"], record["exits"])
            for record in map(json.loads, done.stdout.removesuffix("\n").split("\n"))
        ]

    first = answer(["The ", "a longer prompt than that", "x"], batch=3)
    assert answer(["The ", "a longer prompt than that", "x"], batch=3) == first
    assert answer(["The ", "something else"], batch=2)[0] == first[0]
