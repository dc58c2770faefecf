"""Bundles in transformers, and checkpoints of transformers as bundles."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvium_titan.bundle import BundleConfig, expected_tensors, read_bundle, write_bundle
from nvium_titan.convert.export import bundle_config
from nvium_titan.convert.hf import NEW_ROUTER_LOGIT, grow_junctions, import_hf, read_hf
from nvium_titan.convert.layout import to_bundle
from nvium_titan.convert.names import native_to_hf
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode import Engine, SamplingParams
from nvium_titan.errors import BundleError, ConfigError, TokenizerError
from nvium_titan.text.tokenizer import ByteTokenizer
from nvium_titan.train.model import model_spec
from tests.helpers.hf_models import save_tiny_llama
from tests.helpers.reference import reference_forward
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

NUM_POSITIONS = 64
BOUND = {"rtol": 1e-5, "atol": 1e-5}
DENSE = {"exit_layers": (), "final_adapter": False}


@pytest.fixture(autouse=True)
def _own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the copies that transformers makes of modelling files out of the home directory."""
    folder = str(tmp_path / "hf_modules")
    for module in (transformers.dynamic_module_utils, transformers.utils.hub):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def open_quietly(folder: Path, **options: Any) -> Any:
    """Return the model of a folder; anything that transformers has to say of it is a failure."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, **options
            )
    finally:
        logger.removeHandler(handler)
    assert not any(report.values()), report
    assert said == []
    return model


def write(folder: Path, config: BundleConfig, tensors: dict[str, Tensor], **options: Any) -> None:
    write_bundle(
        folder, config=config, tensors=tensors, tokenizer=ByteTokenizer(), provenance={}, **options
    )


def some_ids(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (NUM_POSITIONS,), generator=torch.Generator().manual_seed(5))


def dense_shape(**changes: Any) -> ModelShape:
    """Return a dense model of more than 1 MB whose exported q and k differ from its own."""
    return dataclasses.replace(flavor_shape("dense-debug"), **changes)


def native_model(shape: ModelShape) -> tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]:
    """Return a random training model as a function from ids to logits, and its tensors."""
    model = model_spec(shape, flavor="test").model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)

    @torch.no_grad()
    def logits_of(ids_T: Tensor) -> Tensor:
        positions = torch.arange(len(ids_T))[None]
        masks = model.get_attention_masks(positions)
        states, _ = model(ids_T[None], positions=positions, attention_masks=masks)
        return model.lm_head(states[-1])[0]

    names = native_to_hf(shape)
    state = {name: t.detach().clone() for name, t in model.state_dict().items() if name in names}
    return logits_of, state


SHAPES = [
    pytest.param({}, id="mha"),
    pytest.param({"num_kv_heads": 2}, id="gqa"),
    pytest.param({"num_kv_heads": 1, "rope_theta": 5e5}, id="one-kv-head"),
    pytest.param({"tie_embeddings": True}, id="tied"),
]


@pytest.mark.cases
@pytest.mark.parametrize("changes", SHAPES)
def test_exp_01_a_dense_export_gives_the_trained_logits(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    shape = dense_shape(**changes)
    logits_of, state = native_model(shape)
    config = bundle_config(shape, tokenizer=ByteTokenizer(), dtype="float32")
    tensors = {name: t.contiguous() for name, t in to_bundle(state, shape).items()}
    write(tmp_path / "dense", config, tensors)
    model = open_quietly(tmp_path / "dense")
    assert type(model) is transformers.LlamaForCausalLM
    ids_T = some_ids(shape.vocab_size)
    with torch.no_grad():
        torch.testing.assert_close(model(ids_T[None]).logits[0], logits_of(ids_T), **BOUND)


@pytest.mark.cases
@pytest.mark.parametrize("part", ["q_proj", "k_proj"])
def test_exp_01_without_the_permutation_the_logits_are_wrong(part: str, tmp_path: Path) -> None:
    shape = dense_shape(num_kv_heads=2)
    logits_of, state = native_model(shape)
    config = bundle_config(shape, tokenizer=ByteTokenizer(), dtype="float32")
    tensors = to_bundle(state, shape)
    natives = {hf: native for native, hf in native_to_hf(shape).items()}
    for name in [name for name in tensors if name.endswith(f"{part}.weight")]:
        tensors[name] = state[natives[name]]
    write(tmp_path / "dense", config, {name: t.contiguous() for name, t in tensors.items()})
    ids_T = some_ids(shape.vocab_size)
    with torch.no_grad():
        gap_T = (open_quietly(tmp_path / "dense")(ids_T[None]).logits[0] - logits_of(ids_T)).abs()
    # One position attends to itself alone, whatever the rotation; the others tell.
    assert gap_T[0].max() < 1e-4
    assert gap_T[1:].max() > 1e-2


@pytest.mark.cases
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="single"),
        pytest.param({"max_shard_size": "200KB"}, id="sharded"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"num_key_value_heads": 4, "rope_theta": 5e5}, id="mha"),
    ],
)
def test_exp_01_hf_to_bundle_to_hf_keeps_every_bit(options: dict[str, Any], tmp_path: Path) -> None:
    first = save_tiny_llama(tmp_path / "llama", **options)
    if "max_shard_size" in options:
        assert len(list((tmp_path / "llama").glob("model-*.safetensors"))) > 1
    import_hf(tmp_path / "llama", tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle").config.is_plain_llama
    second = open_quietly(tmp_path / "bundle")
    assert _same(first.state_dict(), second.state_dict())
    second.save_pretrained(tmp_path / "again")
    ByteTokenizer().save(tmp_path / "again")
    import_hf(tmp_path / "again", tmp_path / "bundle2")
    assert _same(_tensors(tmp_path / "bundle"), _tensors(tmp_path / "bundle2"))
    ids_T = some_ids(272)
    with torch.no_grad():
        assert torch.equal(first(ids_T[None]).logits, second(ids_T[None]).logits)


def _tensors(bundle: Path) -> dict[str, Tensor]:
    return read_bundle(bundle).load_tensors()


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exp_02_transformers_opens_the_type_that_was_asked_for(dtype: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "llama")
    import_hf(tmp_path / "llama", tmp_path / "dense", dtype=dtype)
    import_hf(tmp_path / "llama", tmp_path / "grown", dtype=dtype, exits=[1, 2])
    for folder, options in (("dense", {}), ("grown", {"trust_remote_code": True})):
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert {t.dtype for t in stored.values()} == {getattr(torch, dtype)}
        model = open_quietly(tmp_path / folder, dtype="auto", **options)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert model.config.dtype == getattr(torch, dtype)


@pytest.mark.cases
@pytest.mark.parametrize("max_shard_bytes", [10**9, 10**6], ids=["single-file", "sharded"])
@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "nvium"])
def test_exp_04_a_fresh_process_without_our_package_opens_it(
    is_dense: bool, max_shard_bytes: int, tmp_path: Path
) -> None:
    shape = dense_shape() if is_dense else flavor_shape("debug")
    config = bundle_config(shape, tokenizer=ByteTokenizer(), dtype="float32")
    write(tmp_path / "b", config, lively_tensors(config), max_shard_bytes=max_shard_bytes)
    shards = list((tmp_path / "b").glob("model-*.safetensors"))
    assert (len(shards) > 1) == (max_shard_bytes == 10**6)
    result = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", FRESH_PROCESS, str(tmp_path / "b")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1",
             "HF_HUB_DISABLE_PROGRESS_BARS": "1",
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["class"] == ("LlamaForCausalLM" if is_dense else "NviumForCausalLM")
    assert report["ids"] == [256, 104, 105]
    assert report["special"] == [256, 257]
    assert len(report["new"]) == 8
    assert max(report["new"]) < ByteTokenizer.vocab_size


FRESH_PROCESS = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("nvium_titan", "torchtitan"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM, AutoTokenizer

model, report = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], trust_remote_code=True, output_loading_info=True
)
assert not any(report.values()), report
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
batch = tokenizer("hi", return_tensors="pt")
new = model.generate(
    **batch, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=257
)
special = model.generation_config
print(json.dumps({
    "class": type(model).__name__, "ids": batch["input_ids"][0].tolist(),
    "new": new[0, 3:].tolist(), "special": [special.bos_token_id, special.eos_token_id],
}))
"""


NVIUMS = [
    pytest.param({}, id="three-exits-gqa"),
    pytest.param({"num_kv_heads": 4, "exit_layers": (1, 2, 4)}, id="four-exits-mha"),
    pytest.param({"tie": True}, id="tied"),
    pytest.param({"final_adapter": False}, id="no-final-adapter"),
    pytest.param({"exit_layers": ()}, id="one-exit-with-adapter"),
]


def write_nvium(folder: Path, changes: dict[str, Any]) -> tuple[BundleConfig, dict[str, Tensor]]:
    config = tiny_config(vocab_size=258, **changes)
    tensors = lively_tensors(config)
    tensors["model.embed_tokens.weight"] *= config.shape.dim**-0.5  # a tied head's logits
    write(folder, config, tensors)
    return config, tensors


@pytest.mark.cases
@pytest.mark.parametrize("changes", NVIUMS)
def test_exp_06_exits_routers_and_mixture_equal_the_slow_twin(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config, tensors = write_nvium(tmp_path / "nvium", changes)
    model = open_quietly(tmp_path / "nvium", trust_remote_code=True)
    assert type(model).__name__ == "NviumForCausalLM"
    assert set(model.state_dict()) - {"lm_head.weight"} == set(tensors) - {"lm_head.weight"}
    ids_T = some_ids(config.shape.vocab_size)
    twin = reference_forward(config, tensors, ids_T.tolist())
    with torch.no_grad():
        plain = model(ids_T[None])
        full = model(ids_T[None], output_exits=True, labels=ids_T[None])
    assert plain.exit_logits is plain.router_logits is plain.exit_log_probs is None
    torch.testing.assert_close(plain.logits[0].double(), twin.log_mix_TV, **BOUND)
    assert torch.equal(full.logits, plain.logits)
    for got, wanted in (
        (full.exit_logits, twin.logits_ETV.transpose(0, 1)),
        (full.router_logits, twin.router_logit_JT.T),
        (full.exit_log_probs, twin.log_exit_ET.T),
    ):
        torch.testing.assert_close(got[0].double(), wanted, **BOUND)
    loss = -twin.log_mix_TV[:-1].gather(1, ids_T[1:, None]).mean()
    torch.testing.assert_close(full.loss.double(), loss, **BOUND)


@pytest.mark.cases
@pytest.mark.parametrize("changes", NVIUMS)
def test_exp_06_greedy_generate_equals_our_engine(changes: dict[str, Any], tmp_path: Path) -> None:
    config, _ = write_nvium(tmp_path / "nvium", changes)
    model = open_quietly(tmp_path / "nvium", trust_remote_code=True)
    engine = Engine.from_bundle(tmp_path / "nvium")
    for start in (0, 20):
        prompt = some_ids(config.shape.vocab_size)[start : start + 12]
        ours = engine.generate(
            prompt.tolist(), max_new_tokens=40, sampling=SamplingParams(temperature=0)
        ).result()
        theirs = model.generate(prompt[None], max_new_tokens=40, do_sample=False)
        assert theirs[0, 12:].tolist() == list(ours.token_ids)
        if config.shape.exit_layers:
            assert sum(count > 0 for count in ours.exit_counts) > 1


def test_the_cache_and_the_kept_positions_change_nothing(tmp_path: Path) -> None:
    config, _ = write_nvium(tmp_path / "nvium", {})
    model = open_quietly(tmp_path / "nvium", trust_remote_code=True)
    ids_BT = some_ids(config.shape.vocab_size).view(2, 32)
    with torch.no_grad():
        whole = model(ids_BT).logits
        first = model(ids_BT[:, :20], use_cache=True)
        second = model(ids_BT[:, 20:], past_key_values=first.past_key_values, logits_to_keep=3)
        tuple_ = model(ids_BT, return_dict=False)
        named = model(ids_BT, output_hidden_states=True)
    torch.testing.assert_close(first.logits, whole[:, :20], **BOUND)
    torch.testing.assert_close(second.logits, whole[:, -3:], **BOUND)
    assert torch.equal(tuple_[0], whole)
    assert first.hidden_states is None
    assert len(named.hidden_states) == config.shape.num_layers + 1
    # A batch padded on the left, as `generate` takes it.
    padded = torch.nn.functional.pad(ids_BT[:1, :10], (4, 0))
    mask = torch.nn.functional.pad(torch.ones(1, 10, dtype=torch.long), (4, 0))
    plain = model.generate(ids_BT[:1, :10], max_new_tokens=20, do_sample=False)
    shifted = model.generate(padded, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(plain[:, 10:], shifted[:, 14:])


def test_an_nvium_saved_by_transformers_comes_back(tmp_path: Path) -> None:
    _, tensors = write_nvium(tmp_path / "nvium", {})
    model = open_quietly(tmp_path / "nvium", trust_remote_code=True)
    model.save_pretrained(tmp_path / "tuned")
    assert (tmp_path / "tuned" / "modeling_nvium.py").is_file()
    import_hf(tmp_path / "tuned", tmp_path / "back", tokenizer="byte")
    assert _same(_tensors(tmp_path / "back"), tensors)
    with pytest.raises(BundleError, match="the model has exits already"):
        import_hf(tmp_path / "tuned", tmp_path / "no", tokenizer="byte", exits=[2])


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}],
    ids=["gqa", "tied", "mha"],
)
def test_grown_junctions_leave_the_final_exit_as_it_was(
    options: dict[str, Any], tmp_path: Path
) -> None:
    first = save_tiny_llama(tmp_path / "llama", **options)
    new = import_hf(tmp_path / "llama", tmp_path / "grown", exits=[1, 3])
    config = read_bundle(tmp_path / "grown").config
    assert set(new) == set(expected_tensors(config)) - set(expected_tensors(read_hf(
        tmp_path / "llama").config))  # fmt: skip
    model = open_quietly(tmp_path / "grown", trust_remote_code=True)
    ids_T = some_ids(258)
    with torch.no_grad():
        dense = first(ids_T[None]).logits
        out = model(ids_T[None], output_exits=True)
    assert torch.equal(out.exit_logits[:, :, -1], dense)
    assert torch.equal(out.router_logits, torch.full_like(out.router_logits, NEW_ROUTER_LOGIT))
    # The mixture loses at most -log(1 - w) at each junction.
    cost = 2 * torch.nn.functional.softplus(torch.tensor(NEW_ROUTER_LOGIT))
    assert (out.logits >= dense.log_softmax(-1) - cost - 1e-5).all()
    # Our own decoder agrees: the final exit, to the bit, is that of the dense bundle.
    import_hf(tmp_path / "llama", tmp_path / "dense")
    grown = Engine.from_bundle(tmp_path / "grown").score(ids_T[None]).log_exits[..., -1]
    assert torch.equal(grown, Engine.from_bundle(tmp_path / "dense").score(ids_T[None]).log_mix)


def test_growing_repeats_for_a_seed_and_copies_the_final_norm(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "llama")
    checkpoint = read_hf(tmp_path / "llama")
    tensors = checkpoint.load_tensors()
    one, same, other = (
        grow_junctions(checkpoint.config, tensors, [2], seed=seed)[1] for seed in (1, 1, 2)
    )
    assert _same(one, same)
    assert not torch.equal(one["early_adapters.0.0.weight"], other["early_adapters.0.0.weight"])
    assert torch.equal(one["early_norms.0.weight"], tensors["model.norm.weight"])
    for exits in ([4], [0], [2, 1], [2, 2]):
        with pytest.raises(ConfigError, match=r"--exits .*lie in \[1, 3\]: the model has 4 layers"):
            grow_junctions(checkpoint.config, tensors, exits)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "mistral"}, r"model_type='mistral': only the LLaMA architecture"),
        ({"architectures": ["LlamaForTokenClassification"]}, r"architectures=.*TokenClass"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling=.*llama3.*not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters=.*yarn.*not supported"),
        ({"attention_bias": True}, r"attention_bias=True: only False is supported"),
        ({"mlp_bias": True}, r"mlp_bias=True: only False is supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu': only 'silu' is supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=.*not read"),
        ({"hidden_size": None}, r"key 'hidden_size' is missing"),
        ({"num_hidden_layers": 5}, r"tensors missing: model\.layers\.4\.input_layernorm"),
        ({"num_hidden_layers": 3}, r"not part of the model: model\.layers\.3\."),
        ({"intermediate_size": 60}, r"gate_proj\.weight is \[64, 32\] .*asks for \[60, 32\]"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight differs from model\.embed_tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_another_model_is_refused_by_name(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(BundleError, match=match):
        import_hf(tmp_path / "llama", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_old_and_new_spellings_are_understood(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "llama", num_key_value_heads=4, rope_theta=5e5)
    wanted = read_hf(tmp_path / "llama").config
    file = tmp_path / "llama" / "config.json"
    data = json.loads(file.read_text())
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "dtype"):
        data.pop(key)
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    file.write_text(json.dumps(data | {"rope_parameters": rope, "eos_token_id": [1, 2]}))
    weights = tmp_path / "llama" / "model.safetensors"
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    save_file(load_file(weights) | buffers, weights)
    assert read_hf(tmp_path / "llama").config == wanted


def test_mixed_types_need_a_type_to_convert_to(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, weights)
    with pytest.raises(BundleError, match=r"model\.norm\.weight is \[32\] bfloat16"):
        import_hf(tmp_path / "llama", tmp_path / "bundle")
    import_hf(tmp_path / "llama", tmp_path / "bundle", dtype="float32")
    assert read_bundle(tmp_path / "bundle").config.dtype == "float32"


def test_a_folder_without_weights_or_tokenizer_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"neither model\.safetensors nor .*save_pretrained"):
        import_hf(tmp_path, tmp_path / "bundle")
    save_tiny_llama(tmp_path / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "llama" / name).unlink()
    with pytest.raises(TokenizerError, match="holds neither"):
        import_hf(tmp_path / "llama", tmp_path / "bundle")
    import_hf(tmp_path / "llama", tmp_path / "bundle", tokenizer="byte")
