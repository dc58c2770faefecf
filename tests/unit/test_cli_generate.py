"""`nvium generate`: every law, what is refused, ends of text, streams and log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_titan import cli
from nvium_titan.bundle import write_bundle
from nvium_titan.decode.forward.native.forward import NativeForward
from nvium_titan.decode.sampling import Draw
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.reference import reference_forward
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

CONFIG = tiny_config(vocab_size=264, max_positions=64)
TENSORS = lively_tensors(CONFIG, router_gain=0.7)
EOS = 257
Generate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "bundle"
    write_bundle(path, config=CONFIG, tensors=TENSORS, tokenizer=ByteTokenizer(), provenance={})
    return path


@pytest.fixture
def generate(bundle: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    def run(*flags: str, prompt: str = "The ") -> dict[str, Any]:
        assert cli.main(["generate", str(bundle), "--prompt", prompt, "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    return run


@pytest.fixture
def refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*flags: str, prompt: str = "The ") -> str:
        assert cli.main(["generate", str(bundle), "--prompt", prompt, *flags]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    return run


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int], int], None]:
    """Give a function that makes the sampled tokens of a prompt of some length the given ids."""

    def install(ids: Sequence[int], num_prompt: int) -> None:
        original = NativeForward.draw

        def draw(self: NativeForward, logits_V: Tensor, draw: Draw) -> int:
            if draw.position - num_prompt < len(ids):
                return ids[draw.position - num_prompt]
            logits_V = logits_V.index_fill(0, torch.tensor([EOS]), -math.inf)
            return original(self, logits_V, draw)

        monkeypatch.setattr(NativeForward, "draw", draw)

    return install


@pytest.mark.parametrize(
    ("flags", "law", "sampling", "policy"),
    [
        ([], "exact mixture", {}, {"name": "SampledRouter", "temperature": 1.0}),
        (
            ["--temperature", ".7", "--top-k", "9", "--top-p", ".9", "--min-p", ".01"],
            "exact mixture, temperature 0.7, top_k 9, top_p 0.9, min_p 0.01 of each exit",
            {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
            {"name": "SampledRouter", "temperature": 1.0},
        ),
        (
            ["--min-p", ".1", "--filter-scope", "mixture"],
            "exact mixture, min_p 0.1 of the mixture",
            {"min_p": 0.1, "filter_scope": "mixture"},
            {"name": "SampledRouter", "temperature": 1.0},
        ),
        (
            ["--greedy", "mixture"],
            "exact mixture, argmax (certified)",
            {"temperature": 0.0},
            {"name": "SampledRouter", "temperature": 1.0},
        ),
        (
            ["--greedy", "router"],
            "approximate: the first exit with w > 1/2, argmax",
            {"temperature": 0.0},
            {"name": "RouterGreedy"},
        ),
        (
            ["--router-temperature", "2"],
            "approximate: mixture reweighted by router temperature 2",
            {},
            {"name": "SampledRouter", "temperature": 2.0},
        ),
        (
            ["--exit", "1", "--temperature", "0"],
            "approximate: exit 1 alone, argmax",
            {"temperature": 0.0},
            {"name": "FixedExit", "exit_index": 0},
        ),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, list) else "",
)
def test_every_law_is_named_and_its_settings_are_echoed(
    flags: list[str], law: str, sampling: dict[str, Any], policy: dict[str, Any], generate: Generate
) -> None:
    record = generate(*flags, "--max-new-tokens", "6", "--seed", "5")
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "filter_scope": "exit"}
    assert record["law"] == law
    assert record["settings"]["sampling"] == plain | sampling
    assert record["settings"]["policy"] == policy
    assert record["settings"]["seed"] == record["seed"] == 5
    assert record["settings"]["max_seq_len"] == 64
    is_certified = law.endswith("(certified)")
    assert (record["certified_early"] is not None) == is_certified


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--greedy", "router", "--temperature", ".5"], "--greedy router takes the likeliest"),
        (["--greedy", "mixture", "--temperature", "nan"], "leave one of them out"),
        (["--exit", "1", "--greedy", "mixture"], "use --temperature 0"),
        (["--exit", "1", "--router-temperature", "2"], "with --exit 1 they draw none"),
        (
            ["--greedy", "router", "--router-temperature", "2"],
            "with --greedy router they draw none",
        ),
        (["--exit", "1", "--top-k", "3", "--filter-scope", "mixture"], "needs the mixture"),
        (["--exit", "4"], "exit 4: the model has exits 1 to 3"),
        (["--exit", "0"], "exit 0: the model has exits 1 to 3"),
        (["--router-temperature", "0"], "router temperature=0"),
        (["--min-p", "1.5"], "min_p=1.5"),
        (["--stop", ""], "a stop string is empty"),
        (["--log-probs"], "--log-probs needs --json"),
        (["--max-seq-len", "0"], "max_seq_len=0"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings_that_cannot_be_are_refused(
    flags: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*flags)


@pytest.mark.cases
@pytest.mark.parametrize("length", [64, 65, 1000])
def test_dec_02_a_prompt_that_does_not_fit_names_the_option(
    length: int, refused: Callable[..., str], generate: Generate
) -> None:
    prompt = "x" * (length - 1)  # BOS is the first token
    message = refused(prompt=prompt)
    assert f"a prompt of {length} tokens" in message
    assert "64 positions" in message
    assert "--max-seq-len" in message
    longer = generate("--max-seq-len", str(length + 2), "--ignore-eos", prompt=prompt)
    assert longer["num_prompt_tokens"] == length
    assert longer["num_new_tokens"] == 2
    assert longer["finish_reason"] == "length"


@pytest.mark.cases
def test_dec_02_an_empty_prompt_starts_from_bos(generate: Generate) -> None:
    record = generate("--max-new-tokens", "3", prompt="")
    assert record["num_prompt_tokens"] == 1
    assert record["num_new_tokens"] >= 1


@pytest.mark.cases
def test_dec_03_temperature_zero_tiny_one_huge_and_impossible(
    generate: Generate, refused: Callable[..., str]
) -> None:
    def ids(*flags: str) -> list[int]:
        tokens = generate(*flags, "--max-new-tokens", "25", "--ignore-eos", "--dtype", "float64")
        return tokens["token_ids"]  # type: ignore[no-any-return]

    greedy = ids("--temperature", "0")
    assert greedy == ids("--temperature", "0", "--seed", "9") == ids("--greedy", "mixture")
    prompt = ByteTokenizer().encode("The ", add_bos=True)
    log_mix_TV = reference_forward(CONFIG, TENSORS, [*prompt, *greedy]).log_mix_TV
    assert greedy == log_mix_TV[len(prompt) - 1 : -1, :258].argmax(-1).tolist()
    assert ids("--temperature", "1e-6", "--filter-scope", "mixture") == greedy
    assert ids("--temperature", "1") == ids()
    assert len(set(ids("--temperature", "1e6"))) > 15
    for wrong in ("-1", "nan"):
        assert "temperature=" in refused("--temperature", wrong)


@pytest.mark.cases
@pytest.mark.parametrize("eos_at", [1, 5, None])
def test_dec_05_eos_ends_the_text_unless_it_is_ignored(
    eos_at: int | None, generate: Generate, force: Callable[[Sequence[int], int], None]
) -> None:
    text = b"abcdefghijkl"
    ids = list(text)
    if eos_at is not None:
        ids[eos_at - 1] = EOS
    force(ids, 5)
    record = generate("--max-new-tokens", "12")
    ignoring = generate("--max-new-tokens", "12", "--ignore-eos")
    assert ignoring["token_ids"] == ids
    assert ignoring["finish_reason"] == "length"
    assert ignoring["settings"]["ignore_eos"] is True
    if eos_at is None:
        assert record["token_ids"] == ids
        assert record["finish_reason"] == "length"
    else:
        assert record["token_ids"] == ids[:eos_at]
        assert record["text"] == text[: eos_at - 1].decode()
        assert record["finish_reason"] == "stop"
        assert record["num_new_tokens"] == eos_at


class Chunks:
    """Standard output that remembers each write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, text: str) -> int:
        self.written.append(text.encode("utf-8"))  # a lone surrogate would fail here
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.cases
@pytest.mark.parametrize(
    "data",
    [
        "\U0001f600\u6f22\u5b57 e\u0301 \u0645\u0631\u062d\u0628\u0627".encode(),
        b"x\xf0\x9f\x98",
        b"\xff\xe6a\x80\xc3(",
    ],
    ids=["emoji-cjk-combining-arabic", "incomplete-tail", "invalid-bytes"],
)
def test_dec_07_a_stream_of_forced_bytes_is_valid_text(
    data: bytes,
    bundle: Path,
    force: Callable[[Sequence[int], int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(list(data), 2)
    out = Chunks()
    monkeypatch.setattr("sys.stdout", out)
    words = ["generate", str(bundle), "--prompt", "x", "--max-new-tokens", str(len(data))]
    assert cli.main(words) == 0
    pieces = [chunk.decode("utf-8") for chunk in out.written]
    assert "".join(pieces) == ByteTokenizer().decode(list(data)) + "\n"
    assert "".join(pieces) == data.decode("utf-8", "replace") + "\n"
    if data.endswith(b"\x98"):
        assert [piece for piece in pieces if piece.strip()] == ["x", "\ufffd"], "the tail, once"


def test_the_first_stop_string_ends_the_text(
    generate: Generate, force: Callable[[Sequence[int], int], None]
) -> None:
    force(list(b"one two three four"), 5)
    record = generate("--stop", "four", "--stop", "o t", "--max-new-tokens", "18")
    assert record["text"] == "one tw"
    assert record["stop_string"] == "o t"
    assert record["finish_reason"] == "stop"
    assert record["settings"]["stop"] == ["four", "o t"]


def test_log_probs_of_each_token_equal_the_twin(generate: Generate) -> None:
    flags = ["--max-new-tokens", "20", "--ignore-eos", "--dtype", "float64"]
    record = generate(*flags, "--log-probs")
    assert record["token_ids"] == generate(*flags)["token_ids"]
    prompt = ByteTokenizer().encode("The ", add_bos=True)
    twin = reference_forward(CONFIG, TENSORS, [*prompt, *record["token_ids"]])
    assert len(record["log_probs"]) == 20
    for row, token in enumerate(record["log_probs"], start=len(prompt) - 1):
        token_id = record["token_ids"][row - len(prompt) + 1]
        k = token["exit"] - 1
        log_pi = float(twin.logits_ETV[k, row].log_softmax(-1)[token_id])
        assert token["exit_prob"] == pytest.approx(float(twin.log_exit_ET[k, row]), abs=1e-9)
        assert token["token_at_exit"] == pytest.approx(log_pi, abs=1e-9)
        assert token["path"] == pytest.approx(token["exit_prob"] + log_pi, abs=1e-9)
        assert token["mixture"] == pytest.approx(float(twin.log_mix_TV[row, token_id]), abs=1e-9)


def test_certified_early_counts_the_tokens_that_left_before_the_last_exit(
    generate: Generate,
) -> None:
    record = generate("--temperature", "0", "--max-new-tokens", "40", "--ignore-eos")
    early = sum(index < 3 for index in record["exits"])
    assert record["certified_early"] == pytest.approx(early / 40)
    assert early > 0
    assert record["layers_saved"] == pytest.approx(1 - record["layers_per_token"] / 5)
    assert math.isfinite(record["layers_saved"])


def test_a_folder_that_is_neither_bundle_nor_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "no checkpoint in it" in capsys.readouterr().err
