"""The model that is trained, and its loss, against numbers of the N-vium authors' code.

The recorded float64 numbers have RMSNorm and RoPE in double too. torchtitan's RoPE turns in
float32 whatever the model's type, so for float64 the tests replace its table and its rotation by
the same in double. float32 runs are stock on both sides.

Shapes: K exits, J = K - 1 junctions, B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torchtitan.models.common import ComplexRoPE

from nvium_titan.bundle import Bundle
from nvium_titan.convert import layout
from nvium_titan.convert.layout import to_bundle
from nvium_titan.convert.reference import export_reference
from nvium_titan.core.mixture import exit_log_probs, mixture_log_prob
from nvium_titan.decode import DecoderParams, Engine
from nvium_titan.train.loss import MixtureLoss
from nvium_titan.train.metrics import MixtureMetrics
from nvium_titan.train.model.model import NviumModel
from tests.helpers.golden import (
    MODELS,
    import_golden,
    load_json,
    rotate_in_double,
    training_model,
)

pytestmark = pytest.mark.parity

DTYPES = {"f32": torch.float32, "f64": torch.float64}
INPUTS = ("nomask", "labels", "labels_attnmask")
PHASES = ("warmup", "main")
ALPHA, BETA = 1.0, 0.15
# Both sides round each float32 logit by up to 2e-5 (recorded as f32_vs_f64_max_abs), and the
# losses are about 10; gradients add up such errors over eight layers.
LOSS_RTOL = {"f64": 1e-9, "f32": 2e-6}
GRADIENT_RTOL = {"f64": 1e-9, "f32": 1e-4}


class Golden:
    """One of the authors' models: what they recorded, and our bundle of it."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.record = load_json(folder / "forward.json")
        self.tensors = load_file(folder / "forward.safetensors")
        self.bundle: Bundle = import_golden(folder, scratch)
        self.ids_BT = torch.tensor(self.record["input_ids"])
        self.positions = self.record["full_vocab_positions"]

    def case(self, name: str) -> dict[str, Any]:
        return self.record["cases"][name]  # type: ignore[no-any-return]

    def model(self, precision: str, *, saturated: bool = False) -> NviumModel:
        tensors = self.bundle.load_tensors(dtype=DTYPES[precision])
        if saturated:
            override = self.case("f64/saturated/main")["router_bias_override"]
            for k, bias in override.items():
                tensors[f"router_heads.{k}.bias"] = torch.tensor(bias, dtype=DTYPES[precision])
        return training_model(self.bundle.config, tensors)

    def labels(self, inputs: str) -> Tensor:
        """Their labels are input positions and shift inside; ours are the next token."""
        key = "labels" if inputs.startswith("labels") else "input_ids"
        return F.pad(torch.tensor(self.record[key])[:, 1:], (0, 1), value=-100)

    def run(self, model: NviumModel, inputs: str = "nomask") -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.ids_BT.shape[1]).expand_as(self.ids_BT)
        mask = model.get_attention_masks(positions=positions)
        if inputs == "labels_attnmask":
            mask = mask & torch.tensor(self.record["attention_mask"]).bool()[:, None, None]
        return model(self.ids_BT, positions=positions, attention_masks=mask)  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=MODELS)
def golden(
    request: pytest.FixtureRequest, golden_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Golden:
    return Golden(golden_dir / request.param, tmp_path_factory.mktemp("golden"))


@pytest.fixture(autouse=True)
def _rope_in_double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "f32" not in getattr(getattr(request.node, "callspec", None), "params", {}).values():
        monkeypatch.setattr(ComplexRoPE, "apply_rotary_emb", staticmethod(rotate_in_double))


def mixture_loss(model: NviumModel, golden: Golden, *, phase: str) -> MixtureLoss:
    loss = MixtureLoss(MixtureLoss.Config(alpha=ALPHA, beta=BETA, num_chunks=5))
    loss.bind(model.lm_head, golden.bundle.config.shape, device=torch.device("cpu"))
    loss.start_step(1 if phase == "warmup" else 100, num_steps=100)
    return loss


def gradient_norms(model: NviumModel, golden: Golden) -> dict[str, float]:
    """Pass the gradients through the same names and layout as the weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    gradients = to_bundle(model.state_dict(), golden.bundle.config.shape)
    return {name: gradient.double().norm().item() for name, gradient in gradients.items()}


def assert_losses(
    found: MixtureMetrics, total: float, losses: dict[str, float], *, phase: str, rtol: float
) -> None:
    active = {
        "total": total,
        "mix_loss": found.mixture_nll,
        **{f"early_ce_loss_{k + 1}": ce for k, ce in enumerate(found.exit_ce[:-1])},
        "final_ce_loss": found.exit_ce[-1],
        "router_warmup_loss": found.balance if phase == "warmup" else 0.0,
        "router_compute_loss": found.expected_depth if phase == "main" else 0.0,
    }
    assert active == pytest.approx(losses, rel=rtol, abs=0)


@pytest.mark.parametrize("precision", DTYPES)
def test_logits_routers_and_mixture(golden: Golden, precision: str) -> None:
    model, expected = golden.model(precision), golden.tensors
    gaps = golden.record["f32_vs_f64_max_abs"]

    def near(name: str) -> dict[str, float]:
        # Two float32 programs are each this far from the float64 numbers.
        if precision == "f32":
            return {"rtol": 0, "atol": 2 * gaps[name]}
        return {"rtol": 1e-9, "atol": 1e-12}

    with torch.no_grad():
        exit_states_KBTD, z_JBT = golden.run(model)
        logits_KBTV = model.lm_head(exit_states_KBTD).double()
    log_exit_KBT = exit_log_probs(z_JBT).double()
    close = torch.testing.assert_close
    at = golden.positions
    close(logits_KBTV[:, :, at], expected["logits_at_positions"], **near("logits"))
    log_pi_KBTV = logits_KBTV.log_softmax(-1)
    log_mix_BTV = mixture_log_prob(log_exit_KBT[..., None], log_pi_KBTV)
    close(log_mix_BTV[:, at], expected["log_pi_mix_at_positions"], **near("log_pi_mix"))
    next_KBT1 = golden.ids_BT[:, 1:, None].expand(len(logits_KBTV), -1, -1, 1)
    label_KBT = log_pi_KBTV[:, :, :-1].gather(-1, next_KBT1)[..., 0]
    close(label_KBT, expected["logprob_next_token"], **near("logits"))
    exits_BTK = log_exit_KBT.exp().permute(1, 2, 0)
    close(exits_BTK, expected["exit_probabilities"], **near("exit_prob"))
    # The clamp of w does not act on these inputs.
    w_JBT = torch.sigmoid(z_JBT.double())
    close(w_JBT, expected["p_exit_conditional_clamped"], **near("exit_prob"))
    rows = expected["router_logits"]
    close(z_JBT.double(), rows[..., 1] - rows[..., 0], **near("logits"))
    if precision == "f64":
        close(logits_KBTV.sum(-1), expected["logits_sum"], rtol=1e-9, atol=1e-10)
        close(logits_KBTV.square().sum(-1), expected["logits_sumsq"], rtol=1e-9, atol=0)
        means = golden.record["exit_probabilities_mean"]
        assert exits_BTK.mean((0, 1)).tolist() == pytest.approx(means, rel=1e-9)
        conditional = golden.record["p_exit_conditional_mean"]
        assert w_JBT.mean((1, 2)).tolist() == pytest.approx(conditional, rel=1e-9)


def test_hidden_states_at_the_exits_and_both_router_rows(golden: Golden) -> None:
    model = golden.model("f64")
    seen: list[Tensor] = []
    rows: list[Tensor] = []
    for layer in model.layers.values():
        if layer.junction is not None:
            layer.junction.norm.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
            layer.junction.router.head.register_forward_hook(lambda _, __, y: rows.append(y))
    model.norm.norm.register_forward_hook(lambda _, __, y: seen.append(y))
    with torch.no_grad():
        golden.run(model)
    means = torch.stack(seen).mean(-1)
    torch.testing.assert_close(means, golden.tensors["early_hidden_mean"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        torch.stack(rows), golden.tensors["router_logits"], rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("precision", DTYPES)
def test_every_loss_and_every_gradient_norm(
    golden: Golden, precision: str, inputs: str, phase: str
) -> None:
    model, labels = golden.model(precision), golden.labels(inputs)
    loss_fn = mixture_loss(model, golden, phase=phase)
    total, _ = loss_fn(golden.run(model, inputs), labels, (labels != -100).sum())
    total.backward()
    found = MixtureMetrics.from_sums(
        loss_fn.sums.tolist(), num_exits=golden.bundle.config.shape.num_exits
    )
    losses = golden.case(f"{precision}/{inputs}/{phase}")["losses"]
    assert_losses(found, total.item(), losses, phase=phase, rtol=LOSS_RTOL[precision])
    recorded = golden.case(f"f64/{inputs}/{phase}")
    norms = gradient_norms(model, golden)
    rtol = GRADIENT_RTOL[precision]
    assert norms == pytest.approx(recorded["grad_norm"], rel=rtol, abs=0)
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    assert whole == pytest.approx(recorded["grad_norm_global"], rel=rtol)


def authors_loss(z_JBT: Tensor, log_label_KBT: Tensor, golden: Golden, phase: str) -> Tensor:
    """Return the objective of every token with the clamps of the authors' code."""
    shape = golden.bundle.config.shape
    w_JBT = torch.sigmoid(z_JBT)
    p_KBT = exit_log_probs(z_JBT).exp()
    mixture = -torch.logsumexp(p_KBT.clamp(1e-8, 1).log() + log_label_KBT, dim=0)
    if phase == "main":
        depths = torch.tensor(shape.depth_fractions, dtype=torch.float64)
        return mixture + BETA * torch.einsum("kbt,k->bt", p_KBT, depths)
    targets = torch.tensor(shape.balance_targets(), dtype=torch.float64)[:, None, None]
    return mixture + ALPHA * (w_JBT.clamp(1e-6, 1 - 1e-6) - targets).square().sum(dim=0)


@pytest.mark.parametrize("phase", PHASES)
def test_saturated_routers_differ_by_the_authors_clamps_alone(golden: Golden, phase: str) -> None:
    """One exit has all the probability; the clamps give the others 1e-8 each, a mass above 1."""
    recorded = golden.case(f"f64/saturated/{phase}")
    losses, labels = recorded["losses"], golden.labels("nomask")
    count = (labels != -100).sum()

    # Our model with their clamps: every recorded number.
    model = golden.model("f64", saturated=True)
    exit_states_KBTD, z_JBT = golden.run(model)
    index = labels.clamp(min=0).expand(len(exit_states_KBTD), *labels.shape)[..., None]
    log_label_KBT = model.lm_head(exit_states_KBTD).log_softmax(-1).gather(-1, index)[..., 0]
    per_token = authors_loss(z_JBT, log_label_KBT, golden, phase)
    total = (per_token * (labels != -100)).sum() / count
    total.backward()
    assert total.item() == pytest.approx(losses["total"], rel=1e-9)
    shares = exit_log_probs(z_JBT.detach()).exp().mean((1, 2)).tolist()
    assert shares == pytest.approx(recorded["mean_exit_probability"], rel=1e-9, abs=1e-15)
    norms = gradient_norms(model, golden)
    # Gradients of 1e-14 are rounding of 1 - w on their side.
    assert norms == pytest.approx(recorded["grad_norm"], rel=1e-9, abs=1e-13)

    # Our loss: exactly that of the exit which has all the probability.
    model = golden.model("f64", saturated=True)
    loss_fn = mixture_loss(model, golden, phase=phase)
    total, _ = loss_fn(golden.run(model), labels, count)
    found = MixtureMetrics.from_sums(
        loss_fn.sums.tolist(), num_exits=golden.bundle.config.shape.num_exits
    )
    taken = max(range(len(shares)), key=shares.__getitem__)
    assert found.mixture_nll == pytest.approx(found.exit_ce[taken], rel=1e-12)
    difference = found.mixture_nll - losses["mix_loss"]
    assert difference > 4e-6  # theirs is too low
    if phase == "warmup":
        off = found.balance - losses["router_warmup_loss"]
        assert 1e-7 < abs(off) < 1e-5
        difference += off
    else:
        assert found.expected_depth == pytest.approx(losses["router_compute_loss"], rel=1e-9)
    assert total.item() - losses["total"] == pytest.approx(difference, rel=1e-6)
    assert {f"early_ce_loss_{k + 1}": ce for k, ce in enumerate(found.exit_ce[:-1])} | {
        "final_ce_loss": found.exit_ce[-1]
    } == pytest.approx({k: v for k, v in losses.items() if "_ce_" in k}, rel=1e-9)


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_missing_rotary_permutation_is_noticed(
    golden: Golden, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shape = golden.bundle.config, golden.bundle.config.shape

    def error_of_the_model() -> float:
        model = golden.model("f64")
        with torch.no_grad():
            logits = model.lm_head(golden.run(model)[0])[:, :, golden.positions]
        return (logits - golden.tensors["logits_at_positions"]).abs().max().item()

    def error_of_the_engine() -> float:
        """Decode what the training model exports."""
        tensors = to_bundle(golden.model("f64").state_dict(), shape)
        scores = Engine(DecoderParams.from_tensors(config, tensors)).score(golden.ids_BT.tolist())
        log_exits_KBT = scores.log_exits.permute(2, 0, 1)
        return (log_exits_KBT - golden.tensors["logprob_next_token"]).abs().max().item()

    error: Callable[[], float] = (
        error_of_the_model if direction == "import" else error_of_the_engine
    )
    assert error() < 1e-9
    left_out = "to_interleaved" if direction == "import" else "to_rotate_half"
    monkeypatch.setattr(layout, left_out, lambda weight, *, num_heads: weight)
    assert error() > 0.1


def test_round_trip_keeps_every_bit_and_setting(golden: Golden, tmp_path: Path) -> None:
    export_reference(golden.bundle, tmp_path / "out")
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (golden.folder / weights).read_bytes()
    experiment = load_json(golden.folder / "exp_config.json")
    assert load_json(tmp_path / "out" / "exp_config.json") == experiment
    llama = load_json(golden.folder / "config.json")
    del llama["transformers_version"]
    assert load_json(tmp_path / "out" / "config.json") == llama | {"torch_dtype": "float32"}
