# ruff: noqa: E501 - one case a line
"""The trainer's whole configuration: the shipped files, strictness, round trips, the registry."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config import ConfigManager

from nvium_titan import config_registry
from nvium_titan.config_registry import config_files
from nvium_titan.core.cost import count_params
from nvium_titan.core.flavors import flavor_names, flavor_shape
from nvium_titan.errors import CheckpointError, ConfigError
from nvium_titan.train import launch as train
from nvium_titan.train.config import dump_config, load_config, save_config
from nvium_titan.train.trainer import NviumTrainer

FILES = config_files()
DEBUG = FILES["debug"]


def load(path: Path, *flags: str) -> NviumTrainer.Config:
    return load_config(NviumTrainer.Config(), path, flags)


def load_text(tmp_path: Path, text: str, *flags: str) -> NviumTrainer.Config:
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return load(path, *flags)


def settings(config: NviumTrainer.Config) -> dict[str, object]:
    """All of a configuration, with the model spec, which holds functions, as its dimensions."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return fields | {"model_spec": config.model_spec.model.shape}


def test_the_defaults_are_a_configuration_that_reads_back_equal(tmp_path):
    save_config(NviumTrainer.Config(), tmp_path / "config.toml")
    assert settings(load(tmp_path / "config.toml")) == settings(NviumTrainer.Config())


@pytest.mark.parametrize("name", FILES)
def test_every_shipped_file_loads_builds_and_reads_back_equal(name, tmp_path):
    config = load(FILES[name])
    with torch.device("meta"):
        model = config.model_spec.model.build()
    shape = flavor_shape(config.model.flavor)
    assert sum(p.numel() for p in model.parameters()) == sum(count_params(shape).values())
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert settings(load(tmp_path / "config.toml")) == settings(config)


def test_every_paper_flavor_has_its_file():
    paper = [name for name in flavor_names() if re.search(r"\d+x\d+$", name)]
    assert set(FILES) == {name.replace("-", "_") for name in paper} | {
        "debug", "demo", "demo_dense", "quadrivium_1536x48_h200x4", "quadrivium_1536x48_h200x8",
        "quadrivium_3b_h200x16", "quadrivium_8b_h200x32",
    }  # fmt: skip


def test_the_files_have_the_papers_numbers(shared_dir):
    grid = json.loads((shared_dir / "golden" / "experiments.json").read_text())["scaling_grid"]
    cells = {f"{cell['hidden']}x{cell['layers']}": cell for cell in grid}
    for name, file in FILES.items():
        kind, _, shape = name.partition("_")
        if shape not in cells:
            continue
        cell, config = cells[shape], load(file)
        assert config.model.flavor == f"{kind}-{shape}"
        assert (
            config.training.steps
            == cell[f"{'nvium' if kind == 'quadrivium' else 'baseline'}_steps"]
        )
        assert config.optimizer.lr == cell["lr"]
        assert config.training.seq_len == 1024
        assert config.training.global_batch_size * 1024 == cell["tokens_per_step"]
        assert config.training.local_batch_size == cell["per_device_batch"]
        assert config.training.max_norm == 1.0
        assert config.training.dtype == "float32"
        assert config.training.mixed_precision_param == "bfloat16"
        assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.95), 1e-8)
        assert config.optimizer.weight_decay == 0.1
        assert (config.loss.beta, config.loss.alpha, config.loss.warmup_fraction) == (
            0.15,
            1.0,
            0.05,
        )
        assert config.lr_scheduler.warmup_ratio == 0.01
        assert config.lr_scheduler.decay_type == "cosine"
        assert config.lr_scheduler.min_lr_factor == 0.1
        # App. G: warm-up, stable, decay, for both models.
        assert config.lr_scheduler.decay_ratio == (0.1 if shape == "1536x48" else None)


def test_torchtitan_finds_the_files_by_name():
    flags = ["--loss.beta", "0.3", "--optimizer.lr", "0.5", "--model.num_layers", "9"]
    config = ConfigManager().parse_args(["--module", "nvium_titan", "--config", "debug", *flags])
    assert settings(config) == settings(load(DEBUG, *flags))
    with pytest.raises(ValueError, match=r"'debgu' not found .*'debug', 'demo', 'demo_dense'"):
        ConfigManager().parse_args(["--module", "nvium_titan", "--config", "debgu"])
    assert "debug" in dir(config_registry)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nvium]\nexit_layer = [1, 2]", "[nvium] exit_layer = [1, 2]: unknown key in [nvium]; did you mean 'exit_layers'?"),
        ("[training]\ncompile = true", "[training] compile = true: no such key in [training]; [compile] is a table of its own"),
    ],
    ids=["misspelt", "stale"],
)  # fmt: skip
def test_cfg_01_misspelt_or_stale_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(f"tiny.toml: {message}")):
        load_text(tmp_path, text)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nexit_layers = [1, 2]", "it belongs in [nvium]"),
        ("[training]\ntensor_parallel_degree = 2", "it belongs in [parallelism]"),
        ("[training]\nmax_seq_len = 2048", "it belongs in [model]"),
        ("[model]\nnum_exits = 2", "it belongs in [nvium]"),
        ("[model]\nbeta = 0.1", "it belongs in [loss]"),
        ("steps = 5", "no such key in the top level; it belongs in [training], [validator]"),
        ("[paralelism]\ntensor_parallel_degree = 2", "[paralelism]: unknown table; did you mean 'parallelism'?"),
        ("[activation_checkpoint]\nmemory_budget = 0.3", "has this key only with kind = 'memory_budget'"),
        ("[[optimizer.param_groups]]\npattern = '.*'", "has this key only with kind = 'param_groups'"),
    ],
)  # fmt: skip
def test_cfg_02_misplaced_key_is_told_its_table(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_text(tmp_path, text)


@pytest.mark.cases
def test_cfg_05_a_missing_checkpoint_never_becomes_random_weights(tmp_path):
    empty, run = tmp_path / "empty", tmp_path / "run"
    empty.mkdir()
    step = run / "checkpoint" / "step-10"
    dcp.save({"weight": torch.zeros(3)}, checkpoint_id=step, no_dist=True)
    fresh = ("--dump_folder", str(tmp_path / "new"))
    key = "--checkpoint.initial_load_path"
    for path, message in (
        (tmp_path / "nowhere", "no .metadata in it; no good checkpoint found"),
        (empty, "no .metadata in it; no good checkpoint found"),
        (run, f"no .metadata in it; good checkpoints: {step}"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"{str(path)!r}: {message}")):
            train.check_inputs(load(DEBUG, *fresh, key, str(path)))
    train.check_inputs(load(DEBUG, *fresh, key, str(step)))
    with pytest.raises(CheckpointError, match=r"load_step=20: no .*good checkpoints: .*step-10"):
        train.check_inputs(load(DEBUG, "--dump_folder", str(run), "--checkpoint.load_step", "20"))
    train.check_inputs(load(DEBUG, "--dump_folder", str(run), "--checkpoint.load_step", "10"))
    with pytest.raises(ConfigError, match="nothing is loaded while enable=false"):
        train.check_inputs(load(DEBUG, key, str(step), "--checkpoint.no_enable"))
    assert not (tmp_path / "new").exists()


@pytest.mark.cases
def test_cfg_05_a_missing_config_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"debgu\.toml: no such config file; did you mean 'debug"):
        load(DEBUG.with_name("debgu.toml"))


@pytest.mark.cases
def test_cfg_07_flags_beat_the_file_and_are_saved(tmp_path):
    text = "[loss]\nbeta = 0.1\n[model]\nflavor = 'debug'\nnum_layers = 9"
    config = load_text(tmp_path, text, "--loss.beta", "0.3", "--model.num_layers", "12")
    assert len(config.model_spec.model.layers) == 12
    saved = dump_config(config)
    assert "beta = 0.3" in saved
    assert "num_layers = 12" in saved


@pytest.mark.cases
@pytest.mark.parametrize(
    "flags",
    [
        ["--training.steps", "0"],
        ["--training.steps", "-1"],
        ["--training.steps", "5", "--lr_scheduler.warmup_steps", "50"],
        ["--training.steps", "5", "--lr_scheduler.total_steps", "4"],
        ["--loss.warmup_fraction", "1.5"],
        ["--loss.warmup_fraction", "-0.1"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_lrs_01_impossible_schedules_are_refused_before_anything_is_built(flags):
    with pytest.raises(ConfigError, match=r"debug\.toml.*: "):
        load(DEBUG, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nvium.exit_layers", "1", "9"], "exit_layers"),
        (["--nvium.num_exits", "5"], "num_exits"),
        (["--model.flavor", "debgu"], "did you mean 'debug'?"),
        (["--model.num_heads", "5"], "num_heads=5"),
        (["--training.seq_len", "4096"], "max_seq_len"),
        (["--parallelism.pipeline_parallel_degree", "2"], "pipeline_parallel_degree=2"),
        (["--validator.steps", "0"], "validation steps must be positive or -1"),
        (["--checkpoint.keep_latest_k", "1"], "at least 2 checkpoint replicas"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_impossible_combinations_name_the_file_and_the_flag(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(DEBUG, *flags)
    assert str(DEBUG) in str(caught.value)
    assert flags[0] in str(caught.value)


def test_torchtitans_own_optimizer_groups_and_checkpointing_kinds_are_reachable(tmp_path):
    config = load_text(
        tmp_path,
        "[optimizer]\nkind = 'param_groups'\n"
        "[[optimizer.param_groups]]\npattern = '.*'\noptimizer_name = 'AdamW'\n"
        "optimizer_kwargs = {lr = 1e-3, betas = [0.9, 0.95]}\n"
        "[activation_checkpoint]\nkind = 'full'\n",
    )
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 1e-3
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert settings(load(tmp_path / "config.toml")) == settings(config)
    assert (
        load_text(tmp_path, "", "--activation_checkpoint.kind", "none").activation_checkpoint
        is None
    )


@pytest.mark.cases
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nvium]\nexit_layer = [1, 2]", "did you mean 'exit_layers'?"),
        ("[training]\nexit_layers = [1, 2]", "it belongs in [nvium]"),
        ("[training]\nsteps = 'ten'", "wrong type string; expected int"),
        ("[nvium]\nexit_layers = [3, 3]", "exit_layers"),
        ("[dataloader]\npath = 'no/such/text.txt'", "no/such/text.txt"),
        ("[dataloader]\npath = ''", "no training text"),
        ("hf_assets_path = 'no/such/tokenizer'\n[dataloader]\ncorpus = 'python_docs'", "no/such/tokenizer"),
        ("[model]\nvocab_size = 100\n[dataloader]\ncorpus = 'python_docs'", "vocab_size"),
    ],
    ids=["misspelt", "misplaced", "type", "exits", "file", "nothing", "tokenizer", "vocabulary"],
)  # fmt: skip
def test_cfg_01_bad_input_ends_the_command_with_2_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, text, message
):
    monkeypatch.setenv("RANK", "0")  # so that the command leaves this process's environment alone
    assets = "" if "hf_assets_path" in text else "hf_assets_path = 'byte'\n"
    file = tmp_path / "bad.toml"
    file.write_text(f"dump_folder = {str(tmp_path / 'out')!r}\n{assets}{text}")
    assert train.main(["--config-file", str(file)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.cases
@pytest.mark.parametrize(("found", "shown"), [("0.2.2", "0.2.2"), (None, "none")])
def test_cfg_04_another_torchtitan_is_named_in_one_line(monkeypatch, capsys, found, shown):
    def version(package: str) -> str:
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    assert train.main(["--config-file", str(DEBUG)]) == 2
    message = capsys.readouterr().err
    assert f"training needs torchtitan 0.3.0, found {shown}" in message
    assert message.count("\n") == 1
