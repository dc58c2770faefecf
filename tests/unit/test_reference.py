"""Checkpoints of the authors' code: what is read, what is refused, and by which name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvium_titan import cli
from nvium_titan.bundle import read_bundle, write_bundle
from nvium_titan.convert.reference import export_reference, find_experiment, import_reference
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.errors import BundleError, TokenizerError
from nvium_titan.text.tokenizer import load_tokenizer
from tests.helpers.golden import load_json, save_word_tokenizer
from tests.helpers.tiny_decoder import lively_tensors, tiny_config
from tests.unit.test_export import write_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(golden_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil, with a tokenizer in it."""
    folder = tmp_path / "run" / "checkpoints" / "checkpoint-1"
    folder.mkdir(parents=True)
    for name in ("config.json", "exp_config.json", WEIGHTS):
        shutil.copyfile(golden_dir / "nvium_uneven" / name, folder / name)
    save_word_tokenizer(folder)
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = load_json(path)
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("levels_up", [0, 1, 2])
def test_hydra_settings_are_found_where_their_trainer_puts_them(
    checkpoint: Path, tmp_path: Path, levels_up: int
) -> None:
    yaml = pytest.importorskip("yaml")
    settings = load_json(checkpoint / "exp_config.json")
    (checkpoint / "exp_config.json").unlink()
    with pytest.raises(BundleError, match=r"neither exp_config.json nor \.hydra/config.yaml"):
        import_reference(checkpoint, tmp_path / "bundle")
    file = [checkpoint, *checkpoint.parents][levels_up] / ".hydra" / "config.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(settings))
    assert find_experiment(checkpoint) == file
    import_reference(checkpoint, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle").config.shape.exit_layers == (1, 5)
    file.write_text("router: [")
    with pytest.raises(BundleError, match=r"config.yaml: cannot be read as YAML"):
        import_reference(checkpoint, tmp_path / "bundle")


def test_yaml_without_pyyaml_names_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / ".hydra").mkdir()
    (checkpoint / "exp_config.json").rename(checkpoint / ".hydra" / "config.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BundleError, match=r"config.yaml: reading it needs PyYAML"):
        import_reference(checkpoint, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["router"].update(router_type="lstm"), r"router\.router_type='lstm': only"),
        (lambda e: e["router"].update(num_layers=2), r"router\.num_layers=2: only 1"),
        (lambda e: e["router"].update(router_temp=0.5), r"router\.router_temp=0\.5: only 1\.0"),
        (lambda e: e.update(temperature=2.0), r"temperature=2\.0: only 1\.0"),
        (lambda e: e["early_adapter"].update(enabled=False), r"early_adapter\.enabled=False: only"),
        (lambda e: e["final_adapter"].update(enabled=False), r"final_adapter\.enabled=False: only"),
        (lambda e: e["final_adapter"].update(dim=32), r"final_adapter\.dim=32: only 64"),
        (lambda e: e["tying"].update(tie_early_to_final=False), r"tying\.tie_early_to_final=False"),
        (lambda e: e["router"].pop("intermediate_size"), r"key router\.intermediate_size is mis"),
        (lambda e: e.pop("early_layer_idx"), r"key early_layer_idx is missing"),
        (
            lambda e: e.update(early_layer_idx=[1, 8]),
            r"exit_layers=\[1, 8\]: 8 must lie in \[1, 7\]",
        ),
        (lambda e: e.update(early_layer_idx="1,5"), r"exit_layers=\['1,5'\]: must be of type"),
        (lambda e: e["tying"].update(tie_final_to_embeddings=True), r"not part .*lm_head\.weight"),
    ],
)
def test_another_model_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(checkpoint / "exp_config.json", change)
    with pytest.raises(BundleError, match=message):
        import_reference(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("router_heads.1.bias"),
            r"checkpoint-1: tensors missing: router_heads\.1\.bias",
        ),
        (
            lambda t: t.update({"early_lm_heads.0.weight": torch.zeros(256, 64)}),
            r"not part of the model: early_lm_heads\.0\.weight",
        ),
        (
            lambda t: t.update({"final_adapter.0.weight": torch.zeros(32, 64)}),
            r"final_adapter\.0\.weight is \[32, 64\].*asks for \[64, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}),
            r"model\.norm\.weight is \[64\] bfloat16",
        ),
    ],
    ids=["missing", "untied-early-head", "shape", "mixed-types"],
)
def test_missing_extra_and_wrong_tensors_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)
    with pytest.raises(BundleError, match=message):
        import_reference(checkpoint, tmp_path / "bundle")


def test_another_backbone_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    edit(checkpoint / "config.json", lambda c: c.update(rope_scaling={"factor": 2}))
    with pytest.raises(BundleError, match=r"rope_scaling=\{'factor': 2\}: only None"):
        import_reference(checkpoint, tmp_path / "bundle")
    edit(checkpoint / "config.json", lambda c: c.update(model_type="gpt2"))
    with pytest.raises(BundleError, match=r"model_type='gpt2' in config.json: must be 'llama'"):
        import_reference(checkpoint, tmp_path / "bundle")


def test_weights_of_a_compiled_model_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    tensors = {n: t.bfloat16() for n, t in load_file(checkpoint / WEIGHTS).items()}
    save_file({f"_orig_mod.{n}": t for n, t in tensors.items()}, checkpoint / WEIGHTS)
    import_reference(checkpoint, tmp_path / "bundle")
    bundle = read_bundle(tmp_path / "bundle")
    assert bundle.config.dtype == "bfloat16"
    loaded = bundle.load_tensors()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_without_a_tokenizer_the_message_says_how_to_give_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json.*name it \(--tokenizer\)"):
        import_reference(checkpoint, tmp_path / "bundle")
    with pytest.raises(TokenizerError, match=r"has 258 ids, but the model has vocab_size=256"):
        import_reference(checkpoint, tmp_path / "bundle", tokenizer="byte")


def test_a_dense_bundle_and_a_full_folder_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    dense = tiny_config(vocab_size=264, exit_layers=(), final_adapter=False)
    write_bundle(
        tmp_path / "dense",
        config=dense,
        tensors=lively_tensors(dense),
        tokenizer=load_tokenizer("byte"),
        provenance={},
    )
    with pytest.raises(BundleError, match="needs early exits and adapters"):
        export_reference(tmp_path / "dense", tmp_path / "out")
    import_reference(checkpoint, tmp_path / "bundle")
    with pytest.raises(BundleError, match="exists and is not empty"):
        export_reference(tmp_path / "bundle", checkpoint)


def test_the_command_goes_there_and_back(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, out = str(tmp_path / "bundle"), str(tmp_path / "out")
    assert cli.main(["import", str(checkpoint), "--out", bundle]) == 0
    assert cli.main(["export", bundle, "--out", out, "--format", "reference"]) == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    assert cli.main(["import", out, "--out", bundle]) == 0
    assert cli.main(["export", bundle, "--out", str(tmp_path / "again")]) == 2
    assert "is a bundle already" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_training_checkpoint_becomes_one_of_theirs(tmp_path: Path) -> None:
    shape = flavor_shape("debug")
    step, state = write_checkpoint(tmp_path, shape)
    out = tmp_path / "out"
    words = ["export", str(step), "--out", str(out), "--format", "reference"]
    assert cli.main(words) == 0
    assert load_json(out / "exp_config.json")["early_layer_idx"] == list(shape.exit_layers)
    assert load_json(out / "config.json")["architectures"] == ["NviumModel"]
    head = load_file(out / WEIGHTS)["lm_head.weight"]
    assert torch.equal(head, state["lm_head.weight"])
    assert load_tokenizer(out).kind == "byte"
