"""The bundle directory: what is written is read back; anything wrong is refused by name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nvium_titan.bundle import BundleConfig, expected_tensors, read_bundle, write_bundle
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import BundleError, TokenizerError
from nvium_titan.text.tokenizer import ByteTokenizer

SHAPE = ModelShape(
    vocab_size=260,
    dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    rope_theta=10000.0,
    norm_eps=1e-6,
    max_seq_len=64,
    tie_embeddings=False,
    exit_layers=(1, 2),
    router_dim=20,
    adapter_dim=32,
)
DENSE: dict[str, Any] = {"shape": SHAPE.dense(), "final_adapter": False}


def make_config(**changes: Any) -> BundleConfig:
    base: dict[str, Any] = {
        "shape": SHAPE,
        "final_adapter": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "dtype": "float32",
    }
    return BundleConfig(**(base | changes))


def random_tensors(config: BundleConfig) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, config.dtype)
    return {name: torch.randn(shape).to(dtype) for name, shape in expected_tensors(config).items()}


def write(directory: Path, config: BundleConfig, **changes: Any) -> dict[str, torch.Tensor]:
    tensors = random_tensors(config)
    arguments: dict[str, Any] = {
        "config": config,
        "tensors": tensors,
        "tokenizer": ByteTokenizer(),
        "provenance": {"step": 7},
    }
    write_bundle(directory, **(arguments | changes))
    return tensors


def stored_bytes(directory: Path) -> tuple[int, set[str], set[str]]:
    """Tensor bytes, types and names, as the files say."""
    num_bytes, dtypes, names = 0, set(), set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (a reader is not a mapping)
                tensor = reader.get_tensor(name)
                num_bytes += tensor.nbytes
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
                names.add(name)
    return num_bytes, dtypes, names


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="three-exits"),
        pytest.param({"shape": replace(SHAPE, tie_embeddings=True)}, id="tied"),
        pytest.param(DENSE, id="dense"),
        pytest.param(
            {"shape": replace(SHAPE, exit_layers=(), router_dim=0), "eos_token_id": None},
            id="one-exit-with-adapter",
        ),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    ],
)
def test_written_bundle_reads_back_equal(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    tensors = write(tmp_path / "bundle", config)
    bundle = read_bundle(tmp_path / "bundle")
    assert bundle.config == config
    assert bundle.provenance == {"step": 7}
    assert bundle.tokenizer_vocab_size == 258
    loaded = bundle.load_tensors()
    assert list(loaded) == list(expected_tensors(config))
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert bundle.load_tokenizer().encode("hi") == [104, 105]
    assert {p.name for p in tmp_path.iterdir()} == {"bundle"}


def test_dense_config_is_a_plain_llama() -> None:
    data = make_config(**DENSE).to_json()
    assert data["architectures"] == ["LlamaForCausalLM"]
    assert data["model_type"] == "llama"
    assert not {"exit_layers", "router_dim", "adapter_dim", "final_adapter"} & set(data)
    assert make_config().to_json()["model_type"] == "nvium"


@pytest.mark.parity
@pytest.mark.parametrize("name", ["nvium_mha", "nvium_gqa", "nvium_uneven"])
def test_tensor_names_are_those_of_the_reference(golden_dir: Path, name: str) -> None:
    folder = golden_dir / name
    data = json.loads((folder / "config.json").read_text())
    experiment = json.loads((folder / "exp_config.json").read_text())
    exits = experiment["early_layer_idx"] if name == "nvium_uneven" else [2, 4, 6]
    config = BundleConfig.from_json(
        data
        | {
            "model_type": "nvium",
            "exit_layers": exits,
            "router_dim": experiment["router"]["intermediate_size"],
            "adapter_dim": experiment["early_adapter"]["dim"],
            "final_adapter": True,
        }
    )
    with safe_open(folder / "model.safetensors", framework="pt") as reader:
        names = list(reader.keys())
        shapes = {n: tuple(reader.get_slice(n).get_shape()) for n in names}
    assert expected_tensors(config) == shapes


@pytest.mark.cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exp_02_dtype_config_and_size_agree(tmp_path: Path, dtype: str) -> None:
    config = make_config(dtype=dtype)
    write(tmp_path / "bundle", config, max_shard_bytes=20_000)
    num_bytes, dtypes, _ = stored_bytes(tmp_path / "bundle")
    data = json.loads((tmp_path / "bundle" / "config.json").read_text())
    index = json.loads((tmp_path / "bundle" / "model.safetensors.index.json").read_text())
    num_elements = sum(torch.Size(shape).numel() for shape in expected_tensors(config).values())
    assert dtypes == {dtype} == {data["dtype"]} == {data["torch_dtype"]}
    assert (
        num_bytes == index["metadata"]["total_size"] == num_elements * (4 if "32" in dtype else 2)
    )
    loaded = read_bundle(tmp_path / "bundle").load_tensors(dtype=torch.float64)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float64}


@pytest.mark.cases
def test_exp_02_tensor_of_another_type_is_refused(tmp_path: Path) -> None:
    config = make_config(dtype="bfloat16")
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    with pytest.raises(
        BundleError, match=r"model\.norm\.weight is \[32\] float32, .*\[32\] bfloat16"
    ):
        write(tmp_path / "bundle", config, tensors=tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cases
def test_exp_04_file_names_and_index_are_what_loaders_look_for(tmp_path: Path) -> None:
    config = make_config(**DENSE)
    tensors = write(tmp_path / "one", config)
    write(tmp_path / "many", config, tensors=tensors, max_shard_bytes=20_000)
    common = {
        "config.json",
        "generation_config.json",
        "nvium.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {p.name for p in (tmp_path / "one").iterdir()} == common | {"model.safetensors"}
    shards = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == set(shards)
    for folder in ("one", "many"):
        num_bytes, _, names = stored_bytes(tmp_path / folder)
        assert names == set(tensors)
        assert num_bytes == index["metadata"]["total_size"]
        loaded = read_bundle(tmp_path / folder).load_tensors()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as reader:
        assert reader.metadata() == {"format": "pt"}


def test_older_bundle_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "bundle", make_config(), max_shard_bytes=20_000)
    write(tmp_path / "bundle", make_config(**DENSE))
    assert read_bundle(tmp_path / "bundle").config == make_config(**DENSE)
    assert len(list((tmp_path / "bundle").glob("*.safetensors"))) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"bundle"}


def test_a_bundle_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "bundle", make_config())
    (tmp_path / "bundle" / "notes.txt").write_text("precious")
    with pytest.raises(BundleError, match=r"notes\.txt in it is not part of one"):
        write(tmp_path / "bundle", make_config(**DENSE))
    assert (tmp_path / "bundle" / "notes.txt").read_text() == "precious"
    assert read_bundle(tmp_path / "bundle").config == make_config()


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(BundleError, match=r"home: exists and is not a bundle.*another output"):
        write(tmp_path / "home", make_config())
    assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"


def test_failed_write_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    write(tmp_path / "bundle", make_config())

    class FullDisk(ByteTokenizer):
        def save(self, directory: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(BundleError, match=r"cannot write the bundle: .*No space left"):
        write(tmp_path / "bundle", make_config(**DENSE), tokenizer=FullDisk())
    assert {p.name for p in tmp_path.iterdir()} == {"bundle"}
    assert read_bundle(tmp_path / "bundle").config == make_config()


@pytest.mark.cases
def test_tok_02_bundle_with_a_larger_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"258 ids, but the model has vocab_size=256"):
        write(tmp_path / "bundle", make_config(shape=replace(SHAPE, vocab_size=256)))
    assert list(tmp_path.iterdir()) == []


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    config = make_config()
    tensors = random_tensors(config)
    del tensors["early_norms.1.weight"]
    tensors["early_norms.2.weight"] = torch.zeros(32)
    with pytest.raises(
        BundleError,
        match=r"missing: early_norms\.1\.weight; tensors not part of the model: early_norms\.2",
    ):
        write(tmp_path / "bundle", config, tensors=tensors)


def test_damaged_bundles_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    with pytest.raises(BundleError, match="no such bundle directory; make one with `nvium export`"):
        read_bundle(path)
    write(path, make_config(), max_shard_bytes=20_000)
    shards = sorted(path.glob("*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleError, match=r"model-00002-of-\d+\.safetensors: damaged or cut short"):
        read_bundle(path)
    shards[1].unlink()
    with pytest.raises(BundleError, match=r"file model-00002-of-\d+\.safetensors is missing"):
        read_bundle(path)
    save_file({"lm_head.weight": torch.zeros(1)}, shards[1])
    with pytest.raises(BundleError, match=r"tensors missing: .*and .* more"):
        read_bundle(path)
    (path / "config.json").write_text("{")
    with pytest.raises(BundleError, match=r"config\.json: cannot be read as JSON"):
        read_bundle(path)
    (path / "nvium.json").unlink()
    with pytest.raises(BundleError, match=r"file nvium\.json is missing"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"model_type": "gpt2"},
            r"x\.json: model_type='gpt2': must be one of nvium, nvium_int8, llama",
        ),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling=.*only None is supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu': only 'silu' is supported"),
        ({"hidden_size": "32"}, r"hidden_size='32': must be of type int"),
        ({"exit_layers": [1.5]}, r"exit_layers=\[1\.5\]: must be of type tuple"),
        ({"tie_word_embeddings": 0}, r"tie_word_embeddings=0: must be of type bool"),
        (
            {"exit_layers": [2, 4]},
            r"x\.json: exit_layers=\[2, 4\]: 4 must lie in \[1, 3\] \(num_hidden_layers=4; "
            r".*; fix config\.json",
        ),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads=3 does not divide num_attention_heads=4; fix config\.json",
        ),
        ({"head_dim": 7}, r"head_dim=7: RoPE needs an even number; fix config\.json"),
        ({"hidden_size": 0}, r"x\.json: hidden_size=0: must be at least 1; fix config\.json"),
        (
            {"rms_norm_eps": 0},
            r"rope_theta=10000\.0, rms_norm_eps=0\.0: both must be > 0; fix config\.json",
        ),
        ({"dtype": "bfloat"}, r"dtype='bfloat'; did you mean 'bfloat16'\?"),
        ({"router_dim": 0}, r"router_dim=0: must be at least 1 with exit_layers=\[1, 2\]; fix"),
        ({"exit_layers": []}, r"router_dim=20: must be 0 without early exits"),
        (
            {"exit_layers": [], "router_dim": 0, "adapter_dim": 0},
            r"adapter_dim=0: must be positive without early exits, with final_adapter=True",
        ),
    ],
)
def test_bad_config_is_refused_by_key(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(BundleError, match=match):
        BundleConfig.from_json(make_config().to_json() | changes, source="x.json")


def test_missing_config_key_is_named() -> None:
    data = make_config().to_json()
    del data["rope_theta"]
    with pytest.raises(BundleError, match="key 'rope_theta' is missing"):
        BundleConfig.from_json(data)


def test_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config().dtype = "float16"  # type: ignore[misc]
