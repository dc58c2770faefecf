"""The sections on Hugging Face in docs/checkpoints.md, as they are written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import torch

from nvium_titan.bundle import read_bundle
from nvium_titan.convert.export import export_checkpoint
from tests.helpers.hf_models import save_tiny_llama
from tests.helpers.reference import reference_forward
from tests.helpers.runs import train_here, write_toml
from tests.helpers.tolerance import assert_alike, model_rounding

pytest.importorskip("transformers")

pytestmark = [pytest.mark.e2e, pytest.mark.cases]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
# The reader's packages may warn; the lines, transformers and the bundle's modelling file may not.
STRICT = """import warnings
warnings.filterwarnings("error", module="transformers|__main__")
"""
SAVE = '\ntorch.save((batch["input_ids"], {**out}, ids), "out.pt")\n'


def section(title: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def run(folder: Path, *command: str) -> str:
    environment = {
        **os.environ,
        "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exp_06_the_python_lines_run_on_a_trained_model(tmp_path: Path) -> None:
    assert train_here(write_toml(tmp_path, training={"steps": 3})) == 0
    export_checkpoint(tmp_path / "run", tmp_path / "bundles" / "mine")
    (code,) = re.findall(r"```python\n(.*?)```", section("To Hugging Face"), flags=re.DOTALL)
    (tmp_path / "lines.py").write_text(STRICT + code + SAVE)
    said = run(tmp_path, "-I", "lines.py")
    assert "torch.Size([1, 5, " in said  # start of text, T, h, e, space
    ids_BT, out, new_BT = torch.load(tmp_path / "out.pt", weights_only=False)
    assert 5 < new_BT.shape[1] <= 55
    bundle = read_bundle(tmp_path / "bundles" / "mine")
    assert int(new_BT.max()) < bundle.tokenizer_vocab_size
    twin = reference_forward(bundle.config, bundle.load_tensors(), ids_BT[0].tolist())
    tolerance = model_rounding(torch.float32, bundle.config.shape, num_tokens=5)
    for key, wanted in (
        ("logits", twin.log_mix_TV),
        ("exit_logits", twin.logits_ETV.transpose(0, 1)),
        ("router_logits", twin.router_logit_JT.T),
        ("exit_log_probs", twin.log_exit_ET.T),
    ):
        assert_alike(out[key][0], wanted, tolerance=tolerance, as_a_whole=1e-5)


def test_exp_06_the_import_lines_run_and_their_tables_train(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "LLAMA", num_hidden_layers=24, vocab_size=258)
    lines = re.findall(r"^nvium (import .*)$", section("From Hugging Face"), flags=re.MULTILINE)
    assert len(lines) == 2
    said = [run(tmp_path, "-m", "nvium_titan.cli", *shlex.split(line)) for line in lines]
    assert said[0] == "imported LLAMA to bundles/dense\n"
    assert read_bundle(tmp_path / "bundles" / "dense").config.is_plain_llama
    tables = tomli.loads(said[1].split("to the TOML file:\n\n")[1])
    assert tables["nvium"]["exit_layers"] == [6, 12, 18]
    assert tables["nvium"]["trainable"] == "junctions"
    tables["nvium"]["num_exits"] = 4  # the helper's settings say 3
    names = ("model", "nvium", "checkpoint")
    toml = write_toml(
        tmp_path, **{name: tables[name] for name in names}, training={"steps": 1}
    )  # fmt: skip
    assert train_here(toml) == 0
