"""The `nvium` command in process: what it prints, where, and its exit codes."""

from __future__ import annotations

import inspect
import io
import json
import re
from pathlib import Path

import pytest
import torch

from nvium_titan import cli
from nvium_titan.bundle import BundleConfig, write_bundle
from nvium_titan.cli import generate
from nvium_titan.text.tokenizer import load_tokenizer
from tests.helpers.tiny_decoder import lively_tensors, tiny_config


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "bundle"
    config: BundleConfig = tiny_config(vocab_size=264)
    write_bundle(
        path,
        config=config,
        tensors=lively_tensors(config),
        tokenizer=load_tokenizer("byte"),
        provenance={},
    )
    return path


def test_help_names_every_subcommand(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    names = re.search(r"\{([a-z,]+)\}", shown)[1].split(",")
    assert {"train", "export", "import", "generate", "info"} <= set(names)


def test_help_gives_each_command_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    _, box = capsys.readouterr().out.split("(required)")
    rows = [line.strip("\u2502 ") for line in box.splitlines()[1:-1]]
    assert rows == [f"\u2022 {name:8}  {line}" for name, (_, line) in cli.COMMANDS.items()]


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "train"])
def test_the_help_of_a_command_keeps_its_docstring(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    kind, _ = cli.COMMANDS[name]
    assert shown.startswith(f"usage: nvium {name} ")
    for paragraph in inspect.getdoc(kind).split("\n\n"):
        assert " ".join(paragraph.split()) in " ".join(shown.split())


def test_bench_train_has_help_of_its_own(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "train", "--help"])
    assert "Measure what a training step costs" in capsys.readouterr().out


def test_info_prints_the_papers_numbers_as_json(capsys):
    words = ["info", "--flavor", "quadrivium-768x24", "--json"]
    assert cli.main([*words, "--exit-probs", ".35", ".2", ".15", ".3"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert round(info["params"] / 1e6, 2) == 226.15
    assert info["exits"] == [6, 12, 18, 24]
    assert round(info["limit_speedup"], 2) == 1.50
    assert info["flops_per_token"] == sum(info["flops_by_term"].values())


def test_info_reproduces_table_4(capsys):
    cli.main(["info", "--flavor", "quadrivium-768x36", "--json"])
    assert round(json.loads(capsys.readouterr().out)["flops_per_token"] / 1e9, 3) == 0.834


def test_info_text_and_list(capsys):
    assert cli.main(["info"]) == 0
    assert "226.15 M" in capsys.readouterr().out
    assert cli.main(["info", "--list"]) == 0
    assert "dense-768x24" in capsys.readouterr().out


def test_generate_streams_the_text_it_reports(bundle, capsys, monkeypatch):
    words = ["generate", str(bundle), "--prompt", "The ", "--max-new-tokens", "12", "--seed", "3"]
    assert cli.main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_new_tokens"] == len(record["token_ids"]) == len(record["exits"])
    assert sum(record["exit_shares"]) == pytest.approx(1)
    assert record["law"].startswith("exact")
    for extra in ([], ["--no-stream"]):
        assert cli.main([*words, *extra]) == 0
        assert capsys.readouterr().out == record["text"] + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("The "))
    words[3] = "-"
    assert cli.main(words) == 0
    assert capsys.readouterr().out == record["text"] + "\n"


def test_generate_prints_its_figures_to_stderr(bundle, capsys):
    words = ["generate", str(bundle), "--prompt", "a", "--max-new-tokens", "5", "--stats"]
    assert cli.main(words) == 0
    figures = {line[:24].strip(): line[24:] for line in capsys.readouterr().err.splitlines()}
    assert len(figures) == len(generate._STATS)
    assert figures["law"] == "exact mixture"
    assert figures["tokens certified early"] == "-"
    assert cli.main([*words, "--temperature", "0"]) == 0
    figures = {line[:24].strip(): line[24:] for line in capsys.readouterr().err.splitlines()}
    assert 0 <= float(figures["tokens certified early"]) <= 1
    assert figures["law"] == "exact mixture, argmax (certified)"
    assert 0 <= float(figures["layers_saved"]) < 1


def test_a_single_token_has_no_rate(bundle, capsys):
    words = ["generate", str(bundle), "--prompt", "a", "--max-new-tokens", "1", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "--flavor", "quadrivium-768x23"], "did you mean 'quadrivium-768x"),
        (["info", "--exit-probs", "0.5", "0.5"], "2 exit shares for 4 exits"),
        (["export", "/nowhere", "--out", "/nowhere/out"], "/nowhere: no such folder"),
        (["generate", "/nowhere", "--prompt", "a"], "/nowhere: no such bundle"),
        (["train"], "--config-file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_message_and_exit_code_2(words, message, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
    assert "Traceback" not in shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said_so(bundle, capsys):
    assert cli.main(["generate", str(bundle), "--prompt", "a", "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU here" in capsys.readouterr().err


def test_unknown_options_are_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", "--flavr", "x"])
    assert "--flavor" in capsys.readouterr().err


def test_interrupts_exit_with_130(monkeypatch, capsys):
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Info, "run", interrupt)
    assert cli.main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err
