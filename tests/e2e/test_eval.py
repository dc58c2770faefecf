"""From training to figures and text without an export in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvium_titan import cli
from nvium_titan.convert.export import export_checkpoint
from tests.helpers.runs import assert_evaluates_alike, train_here, write_toml

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    assert train_here(write_toml(folder)) == 0
    return folder / "run"


@pytest.mark.cases
def test_evl_07_a_checkpoint_scores_and_decodes_as_its_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = run / "checkpoint" / "step-6"
    export_checkpoint(step, tmp_path / "bundle")
    models = (step, run, tmp_path / "bundle")
    files = sorted(run.rglob("*"))
    assert_evaluates_alike(models, run.parent / "text.jsonl", capsys)
    tokens = []
    for model in models:
        words = ["generate", str(model), "--prompt", "the ", "--max-new-tokens", "20", "--json"]
        assert cli.main(words) == 0
        tokens.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert tokens[0] == tokens[1] == tokens[2]
    assert sorted(run.rglob("*")) == files, "nothing is written"
