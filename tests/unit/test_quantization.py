"""Int8 weights: what rounding keeps, on disk and back, what decodes, what an export reports."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvium_titan import cli
from nvium_titan.bundle import BundleConfig, expected_tensors, read_bundle, write_bundle
from nvium_titan.bundle.config import stored_bytes, stored_tensors
from nvium_titan.bundle.quantization import dequantize, int8_scales, is_quantized, quantize_int8
from nvium_titan.convert.export import quantize_bundle
from nvium_titan.convert.load import load_model
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.decode import DecoderParams, Engine
from nvium_titan.errors import BundleError
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.tiny_decoder import lively_tensors, tiny_config
from tests.unit.test_export import write_checkpoint

CONFIG = tiny_config(vocab_size=264, max_positions=64)
INT8 = dataclasses.replace(CONFIG, quantization="int8")
MATRIX = "model.layers.0.mlp.up_proj.weight"
TEXT = "Some text to measure on, of which every byte but the first is a token to be scored.\n"


def write(path: Path, config: BundleConfig, **options: Any) -> dict[str, Tensor]:
    tensors = lively_tensors(config)
    write_bundle(
        path, config=config, tensors=tensors, tokenizer=ByteTokenizer(),
        provenance={"step": 7}, **options,
    )  # fmt: skip
    return tensors


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float32 bundle and the int8 bundle of the same weights."""
    folder = tmp_path_factory.mktemp("int8")
    write(folder / "float32", CONFIG)
    quantize_bundle(folder / "float32", folder / "int8")
    return folder / "float32", folder / "int8"


def all_tensors(value: Any, name: str = "params") -> dict[str, Tensor]:
    """Return every tensor in nested dataclasses and tuples."""
    if isinstance(value, Tensor):
        return {name: value}
    if dataclasses.is_dataclass(value):
        parts = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        parts = [*enumerate(value)] if isinstance(value, tuple) else []
    return {k: v for key, part in parts for k, v in all_tensors(part, f"{name}.{key}").items()}


def assert_same_bits(one: DecoderParams, other: DecoderParams) -> None:
    tensors, others = all_tensors(one), all_tensors(other)
    assert len(tensors) > 20
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype
        assert torch.equal(tensor, others[name]), name


@given(
    rows=st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    exponent=st.integers(-160, 27),
)
@settings(max_examples=300, deadline=None)
def test_rounding_twice_is_rounding_once_to_the_bit(rows: list[list[float]], exponent: int) -> None:
    weight_OI = torch.tensor(rows, dtype=torch.float32) * 2.0**exponent
    once = quantize_int8({"w": weight_OI})
    back = dequantize(once, dtype=torch.float32)
    twice = quantize_int8(back)
    assert list(back) == ["w"]
    assert torch.equal(twice["w"], once["w"])
    assert torch.equal(twice["w_scale"], once["w_scale"])
    assert torch.equal(int8_scales(back["w"]), once["w_scale"])
    assert torch.equal(dequantize(twice, dtype=torch.float32)["w"], back["w"])
    # Products are exact, so every type sees the same weights, and no step is off by more than half.
    exact_OI = once["w"].double() * once["w_scale"].double()[:, None]
    assert torch.equal(back["w"].double(), exact_OI)
    error_OI = (weight_OI.double() - exact_OI).abs()
    assert bool((error_OI <= (0.5 + 1e-4) * once["w_scale"].double()[:, None]).all())
    largest_O = once["w"].abs().amax(1).tolist()
    tiny = 127 * torch.finfo(torch.float32).tiny
    for largest, row in zip(largest_O, weight_OI.abs().amax(1).tolist(), strict=True):
        assert largest == 127 or (largest == 0 and row <= tiny)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    tensors = lively_tensors(INT8)
    tensors[MATRIX][3, 5] = value
    with pytest.raises(BundleError, match=rf"tensor {MATRIX}: holds NaN or infinity"):
        write_bundle(
            tmp_path / "x", config=INT8, tensors=tensors, tokenizer=ByteTokenizer(), provenance={}
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="three-exits"),
        pytest.param({"tie": True}, id="tied"),
        pytest.param({"exit_layers": (), "final_adapter": False}, id="dense"),
    ],
)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["one-file", "shards"])
def test_an_int8_bundle_reads_back_as_it_was_rounded(
    changes: dict[str, Any], max_shard_bytes: int, tmp_path: Path
) -> None:
    config = dataclasses.replace(tiny_config(vocab_size=264, **changes), quantization="int8")
    tensors = write(tmp_path / "x", config, max_shard_bytes=max_shard_bytes)
    bundle = read_bundle(tmp_path / "x")
    assert bundle.config == config
    data = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (data["model_type"], data["quantization"], data["architectures"]) == (
        "nvium_int8", "int8", [],
    )  # fmt: skip
    assert "auto_map" not in data
    assert not (tmp_path / "x" / "modeling_nvium.py").exists()

    files = sorted((tmp_path / "x").glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert stored.keys() == bundle.tensor_files.keys() == stored_tensors(config).keys()
    for name, shape in expected_tensors(config).items():
        is_matrix = len(shape) == 2 and "router_heads" not in name
        assert is_matrix == is_quantized(name, len(shape))
        assert stored[name].dtype == (torch.int8 if is_matrix else torch.float32)
        assert (f"{name}_scale" in stored) == is_matrix
    num_bytes = sum(tensor.nbytes for tensor in stored.values())
    assert (
        num_bytes
        == stored_bytes(config)
        < 0.35 * stored_bytes(dataclasses.replace(config, quantization=None))
    )
    assert len(files) == 1 or max(file.stat().st_size for file in files) < 30_000
    if len(files) > 1:
        index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == num_bytes

    rounded = dequantize(quantize_int8(tensors), dtype=torch.float32)
    for dtype in (None, torch.float32, torch.float64, torch.bfloat16):
        loaded = bundle.load_tensors(dtype=dtype)
        assert list(loaded) == list(expected_tensors(config))
        for name, tensor in loaded.items():
            assert tensor.dtype == (dtype or torch.float32)
            assert torch.equal(tensor, rounded[name].to(tensor.dtype))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t | {f"{MATRIX}_scale": torch.ones(47)},
         r"up_proj\.weight_scale is \[47\] float32, config\.json asks for \[48\] float32"),
        (lambda t: t | {f"{MATRIX}_scale": torch.ones(48).half()},
         r"up_proj\.weight_scale is \[48\] float16, config\.json asks for \[48\] float32"),
        (lambda t: t | {MATRIX: torch.ones(48, 32)},
         r"up_proj\.weight is \[48, 32\] float32, config\.json asks for \[48, 32\] int8"),
        (lambda t: {n: x for n, x in t.items() if n != f"{MATRIX}_scale"},
         r"tensors missing: model\.layers\.0\.mlp\.up_proj\.weight_scale"),
        (lambda t: t | {"router_heads.0.weight_scale": torch.ones(2)},
         r"not part of the model: router_heads\.0\.weight_scale"),
    ],
    ids=["scale-shape", "scale-type", "matrix-type", "scale-missing", "scale-extra"],
)  # fmt: skip
def test_wrong_tensors_of_an_int8_bundle_are_named(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], match: str, tmp_path: Path
) -> None:
    write(tmp_path / "x", INT8)
    file = tmp_path / "x" / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(BundleError, match=match):
        read_bundle(tmp_path / "x")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"quantization": "int4"}, r"quantization='int4'; did you mean 'int8'\? \(valid: int8\)"),
        ({"quantization": 8}, r"quantization=8: must be of type str \| None"),
        ({"quantization": None}, r"model_type='nvium_int8' with quantization=None"),
        ({"model_type": "nvium"}, r"model_type='nvium' with quantization='int8'"),
        ({"model_type": "llama"}, r"model_type='llama' with quantization='int8'"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16': must be 'float32' with quantization='int8'"),
    ],
)
def test_bad_quantization_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(BundleError, match=match):
        BundleConfig.from_json(INT8.to_json() | changes)


def test_a_bundle_that_is_not_quantised_says_nothing_of_it() -> None:
    for config in (CONFIG, tiny_config(exit_layers=(), final_adapter=False)):
        assert "quantization" not in config.to_json()
        assert BundleConfig.from_json(config.to_json()) == config
    dense = dataclasses.replace(
        tiny_config(exit_layers=(), final_adapter=False), quantization="int8"
    )
    assert not dense.is_plain_llama
    assert BundleConfig.from_json(dense.to_json()) == dense


@pytest.mark.parametrize("dense", [False, True], ids=["nvium", "dense"])
def test_transformers_refuses_an_int8_bundle(dense: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    changes: dict[str, Any] = {"exit_layers": (), "final_adapter": False} if dense else {}
    config = dataclasses.replace(tiny_config(vocab_size=264, **changes), quantization="int8")
    write(tmp_path / "x", config)
    for trust in (False, True):
        with pytest.raises(ValueError, match="model type `nvium_int8` but Transformers does not"):
            transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "x", trust_remote_code=trust
            )
    assert cli.main(["import", str(tmp_path / "x"), "--out", str(tmp_path / "y")]) == 2


def test_int8_on_disk_and_int8_at_load_are_the_same_weights(bundles: tuple[Path, Path]) -> None:
    float32, int8 = bundles
    stored = DecoderParams.from_bundle(int8)
    assert stored.is_int8
    assert not DecoderParams.from_bundle(float32).is_int8
    assert_same_bits(stored, DecoderParams.from_bundle(float32, dtype=torch.int8))
    assert_same_bits(stored, DecoderParams.from_bundle(int8, dtype=torch.int8))
    explicit = DecoderParams.from_bundle(int8, dtype=torch.float32)
    assert not explicit.is_int8
    assert_same_bits(stored.dense(), explicit)
    assert DecoderParams.from_bundle(int8, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_both_decode_and_score_alike(bundles: tuple[Path, Path]) -> None:
    float32, int8 = bundles
    stored = Engine.from_bundle(int8)
    assert stored.params.is_int8
    rounded = Engine.from_bundle(float32, dtype=torch.int8)
    plain = Engine.from_bundle(float32)
    ids = [256, *TEXT[:20].encode()]
    for seed in range(3):
        results = []
        for engine in (stored, rounded, plain):
            generation = engine.generate(ids, max_new_tokens=30, seed=seed)
            for _ in generation:
                pass
            results.append(generation.result())
        assert results[0].token_ids == results[1].token_ids
        assert results[0].exit_indices == results[1].exit_indices
        assert len(set(results[0].exit_indices)) > 1
    scores = [engine.score([ids]).log_mix for engine in (stored, rounded, plain)]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])


def test_a_model_is_loaded_in_its_own_type(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    float32, int8 = bundles
    assert load_model(float32).dtype == "float32"
    assert load_model(int8).dtype == "int8"
    assert load_model(int8, dtype=torch.float64).dtype == "float64"
    step, _ = write_checkpoint(tmp_path, flavor_shape("debug"))
    (tmp_path / "bundle.txt").write_text(TEXT)
    words = ["export", str(step), "--out", str(tmp_path / "x"), "--quantize", "int8"]
    assert cli.main([*words, "--text", str(tmp_path / "bundle.txt")]) == 0
    assert load_model(step).dtype == "float32"
    assert_same_bits(load_model(step, dtype=torch.int8).params, load_model(tmp_path / "x").params)


def perplexity_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["beside", "in-place"])
def test_the_export_prints_what_int8_costs(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "float32", CONFIG)
    (tmp_path / "text.txt").write_text(TEXT)
    text = ["--text", str(tmp_path / "text.txt")]
    before = perplexity_of(capsys, str(tmp_path / "float32"), *text)
    out = tmp_path / ("int8" if place == "beside" else "float32")
    words = ["export", str(tmp_path / "float32"), "--out", str(out), "--quantize", "int8"]
    assert cli.main([*words, *text]) == 0
    lines = capsys.readouterr().out.splitlines()
    after = perplexity_of(capsys, str(out), *text)
    assert (before["dtype"], after["dtype"]) == ("float32", "int8")
    one, other = (result["modes"][0]["token_perplexity"] for result in (before, after))
    assert one != other
    assert lines == [
        f"exported {tmp_path / 'float32'} to {out}",
        "weights on disk: 0.3 MB (float32) -> 0.1 MB (int8)",
        f"perplexity on {len(TEXT)} tokens of {tmp_path / 'text.txt'}: {one:.3f} -> {other:.3f} "
        f"({100 * (other / one - 1):+.2f}%)",
    ]
    assert read_bundle(out).provenance == {"step": 7}


def test_a_checkpoint_is_measured_on_held_out_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.convert, "HELD_OUT_TOKENS", 300)
    step, _ = write_checkpoint(tmp_path, flavor_shape("debug"))
    words = ["export", str(tmp_path), "--out", str(tmp_path / "x"), "--quantize", "int8"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"exported {step} to {tmp_path / 'x'}"
    shown = re.fullmatch(
        r"perplexity on 300 tokens of held-out Python documentation: ([\d.]+) -> ([\d.]+) "
        r"\(([+-][\d.]+)%\)",
        lines[2],
    )
    assert shown
    # An untrained model knows next to nothing, and rounding takes next to nothing of it.
    assert 200 < float(shown[1]) < 330
    assert abs(float(shown[3])) < 1
    assert read_bundle(tmp_path / "x").provenance["step"] == 4
    assert cli.main(["generate", str(tmp_path / "x"), "--prompt", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["dtype"] == "int8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantize", "int8", "--format", "reference"], "--quantize int8 goes with --format b"),
        (["--quantize", "int8", "--dtype", "bfloat16"], "leave out --dtype bfloat16"),
        (["--text", "x.txt"], "--text x.txt measures what --quantize costs"),
        (["--quantize", "int8", "--tokenizer", "byte"], "keeps its type and tokenizer"),
        (["--quantize", "int8", "--text", "/nowhere.txt"], "/nowhere.txt: no such file"),
        ([], "is a bundle already: it can only take --quantize int8 or --format reference"),
    ],
    ids=["reference", "dtype", "text", "tokenizer", "no-text", "nothing"],
)
def test_options_that_exclude_each_other_are_refused(
    words: list[str],
    message: str,
    bundles: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["export", str(bundles[0]), "--out", str(tmp_path / "x"), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_int8_bundle_is_not_quantised_again_but_goes_to_the_authors_format(
    bundles: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    int8 = str(bundles[1])
    words = ["export", int8, "--out", str(tmp_path / "x")]
    assert cli.main([*words, "--quantize", "int8"]) == 2
    assert "is quantised to int8 already" in capsys.readouterr().err
    assert cli.main([*words, "--format", "reference"]) == 0
    theirs = load_file(tmp_path / "x" / "model.safetensors")
    ours = read_bundle(int8).load_tensors()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
