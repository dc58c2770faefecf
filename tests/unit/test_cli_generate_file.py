"""`nvium generate --prompts-file`: what is read, answers whatever --batch says, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvium_titan import cli
from nvium_titan.bundle import write_bundle
from nvium_titan.cli.prompts import read_prompts
from nvium_titan.errors import PromptError
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

CONFIG = tiny_config(vocab_size=264, max_positions=64)
PROMPTS = ["The ", "a", "Once upon a time ", "xyz", ""]
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "bundle"
    tensors = lively_tensors(CONFIG, router_gain=0.7)
    write_bundle(path, config=CONFIG, tensors=tensors, tokenizer=ByteTokenizer(), provenance={})
    return path


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text} if i % 2 else {"text": text} for i, text in enumerate(PROMPTS)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def run(bundle: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*flags: str, code: int = 0) -> tuple[str, str]:
        assert cli.main(["generate", str(bundle), "--max-new-tokens", "20", *flags]) == code
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


def answers(out: str) -> list[dict[str, Any]]:
    """Return the records without what a clock or the companions decide."""
    records = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    for record in records:
        for name in ("ttft_ms", "tokens_per_s", "layers_per_token", "layers_saved"):
            record.pop(name)
        record.pop("mean_group_size")
        for token in record.get("log_probs", ()):
            token.update({name: pytest.approx(value, abs=1e-5) for name, value in token.items()})
    return records


@pytest.mark.parametrize(
    "flags",
    [(), ("--temperature", "0"), ("--exit", "1"), ("--log-probs",), ("--stop", "e", "--stop", "9")],
    ids=["sampled", "greedy", "exit", "log-probs", "stop"],
)
def test_answers_are_those_of_single_prompts_for_any_batch(
    flags: tuple[str, ...], run: Run, prompts_file: Path
) -> None:
    singles = []
    for index, prompt in enumerate(PROMPTS):
        words = ("--prompt", prompt, "--seed", str(5 + index), "--json", *flags)
        singles += answers(run(*words)[0])
    for batch in ("1", "2", "8"):
        words = ("--prompts-file", str(prompts_file), "--seed", "5", "--batch", batch)
        assert answers(run(*words, "--json", *flags)[0]) == singles
    assert [record["prompt"] for record in singles] == PROMPTS


def test_text_is_printed_under_its_prompt_and_figures_to_stderr(
    run: Run, prompts_file: Path
) -> None:
    out, err = run("--prompts-file", str(prompts_file), "--stats", "--batch", "3")
    records = answers(run("--prompts-file", str(prompts_file), "--json")[0])
    expected = [f"[{i + 1}] {r['prompt']}\n{r['text']}\n\n" for i, r in enumerate(records)]
    assert out == "".join(expected)
    figures = dict(line.split(maxsplit=1) for line in err.splitlines())
    assert figures["num_prompts"] == "5"
    assert int(figures["num_new_tokens"]) == sum(r["num_new_tokens"] for r in records)
    assert sum(map(float, figures["exit_shares"].split())) == pytest.approx(1, abs=0.02)
    assert float(figures["tokens_per_s"]) > 0


def test_other_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('first \r\n\n  \n{"prompt": 1}\nlast\u2028one'.encode())
    assert read_prompts(path) == ["first ", '{"prompt": 1}', "last\u2028one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n["x"]\n', r'a\.jsonl:2: expected an object.*"prompt"'),
        ("a.jsonl", b'\n{"prompt": 3}', r"a\.jsonl:2: expected an object"),
        ("a.jsonl", b'{"question": "x"}', r"a\.jsonl:1: expected an object"),
        ("a.txt", b"\n \n", r"a\.txt: no line has a prompt"),
        ("a.txt", b"\xff\xfe", r"a\.txt: .*utf-8"),
    ],
    ids=["no-json", "no-object", "no-text", "other-key", "blank", "no-utf-8"],
)
def test_a_malformed_file_is_refused_with_its_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)


def test_wrong_use_is_refused(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    for flags, message in (
        ((), "either --prompt or --prompts-file"),
        (("--prompt", "a", "--prompts-file", str(prompts_file)), "either --prompt or"),
        (("--prompts-file", str(tmp_path / "none.txt")), "No such file"),
        (("--prompts-file", str(prompts_file), "--batch", "0"), "batch_size=0 (--batch)"),
        (("--prompts-file", str(prompts_file), "--max-seq-len", "10"), "request 3: a prompt of"),
    ):
        out, err = run(*flags, code=2)
        assert out == ""
        assert message in err
