"""The mixture loss against a slow twin written from the equations, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.mixture import exit_log_probs, expected_depth, mixture_log_prob
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError
from nvium_titan.train.loss import MixtureLoss, _LabelNll
from nvium_titan.train.metrics import MixtureMetrics
from nvium_titan.train.objective import phase_weights, token_terms

SHAPE = replace(flavor_shape("debug"), num_layers=6, exit_layers=(1, 3))
WIDTH, VOCAB = 8, 11


def make_loss(
    head: nn.Module, *, shape: ModelShape = SHAPE, num_chunks: int = 3, phase: str = "main"
) -> MixtureLoss:
    loss = MixtureLoss(MixtureLoss.Config(beta=0.3, alpha=0.7, num_chunks=num_chunks))
    loss.bind(head, shape, device=torch.device("cpu"))
    loss.start_step(1 if phase == "warmup" else 100, num_steps=100)
    return loss


def make_head(dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)


def make_batch(
    *, num_exits: int = 3, batch: int = 2, tokens: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    o = torch.randn(num_exits, batch, tokens, WIDTH, dtype=dtype, requires_grad=True)
    z = torch.randn(num_exits - 1, batch, tokens, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (batch, tokens))
    labels[0, 2:4] = -100
    return o, z, labels


def slow_loss(
    o: Tensor, z: Tensor, labels: Tensor, weight: Tensor, *, shape: ModelShape = SHAPE, phase: str
) -> Tensor:
    """The objective token by token, in probabilities, as the paper writes it."""
    total, count = torch.zeros((), dtype=o.dtype), 0
    for b in range(labels.shape[0]):
        for t in range(labels.shape[1]):
            if labels[b, t] == -100:
                continue
            count += 1
            arrive = torch.ones((), dtype=o.dtype)
            pi_mix = torch.zeros((), dtype=o.dtype)
            depth = torch.zeros((), dtype=o.dtype)
            balance = torch.zeros((), dtype=o.dtype)
            for k in range(shape.num_exits):
                last = k == shape.num_exits - 1
                w = torch.ones((), dtype=o.dtype) if last else torch.sigmoid(z[k, b, t])
                pi = F.softmax(weight @ o[k, b, t], dim=-1)
                pi_mix = pi_mix + arrive * w * pi[labels[b, t]]
                depth = depth + arrive * w * shape.block_ends[k] / shape.num_layers
                if not last:
                    balance = balance + (w - 1 / (shape.num_exits - k)) ** 2
                arrive = arrive * (1 - w)
            extra = 0.7 * balance if phase == "warmup" else 0.3 * depth
            total = total - torch.log(pi_mix) + extra
    return total / max(count, 1)


@pytest.mark.parametrize("phase", ["warmup", "main"])
@pytest.mark.parametrize("num_chunks", [1, 3, 4, 9, 50])
def test_loss_and_every_gradient_equal_the_slow_twin(phase: str, num_chunks: int) -> None:
    head = make_head()
    o, z, labels = make_batch()
    loss, _ = make_loss(head, num_chunks=num_chunks, phase=phase)(
        (o, z), labels, (labels != -100).sum()
    )
    loss.backward()
    fast = [x.grad.clone() for x in (o, z, head.weight)]
    for x in (o, z, head.weight):
        x.grad = None
    expected = slow_loss(o, z, labels, head.weight, phase=phase)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for got, x in zip(fast, (o, z, head.weight), strict=True):
        torch.testing.assert_close(got, x.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_the_label_s_loss_and_gradient_equal_torch_s(scale: float, dtype: torch.dtype) -> None:
    logits = (scale * torch.randn(40, VOCAB, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, VOCAB, (40,))
    labels[3:7] = -100
    labels[8] = logits[8].argmax()
    weights = torch.randn(40, dtype=dtype)
    want = F.cross_entropy(logits.double(), labels, reduction="none")
    (grad,) = torch.autograd.grad((want * weights).sum(), logits)
    got = _LabelNll.apply(logits * 1, labels, None)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    got.backward(weights)
    torch.testing.assert_close(logits.grad, grad, rtol=0, atol=tolerance)
    assert not logits.grad[3:7].any()


def test_a_label_outside_the_vocabulary_is_no_label() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        _LabelNll.apply(torch.randn(2, VOCAB), torch.tensor([0, VOCAB]), None)


@pytest.mark.cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("saturated", [40.0, -40.0, 200.0, -200.0, math.inf, -math.inf])
@pytest.mark.parametrize("phase", ["warmup", "main"])
def test_num_02_mixture_weight_of_exactly_zero(
    saturated: float, dtype: torch.dtype, phase: str
) -> None:
    head = make_head(dtype)
    o, z, labels = make_batch(dtype=dtype)
    z = z.detach()
    z[0, :, ::2] = saturated
    z[1, :, 1::2] = saturated
    z.requires_grad_()
    loss, _ = make_loss(head, phase=phase)((o, z), labels, (labels != -100).sum())
    loss.backward()
    o64, z64, w64 = (x.detach().double().requires_grad_() for x in (o, z, head.weight))
    log_label = torch.stack([F.log_softmax(o64[k] @ w64.T, -1) for k in range(3)]).gather(
        -1, labels.clamp(min=0).expand(3, *labels.shape)[..., None]
    )[..., 0]
    terms = token_terms(z64, log_label, SHAPE)
    extra = 0.7 * terms.balance if phase == "warmup" else 0.3 * terms.expected_depth
    valid = labels != -100
    expected = ((terms.mixture_nll + extra) * valid).sum() / valid.sum()
    expected.backward()
    assert loss.isfinite()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for x, slow in ((o, o64), (z, z64), (head.weight, w64)):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        torch.testing.assert_close(x.grad.double(), slow.grad, rtol=1e-4, atol=1e-8)
    p = exit_log_probs(z.detach()).exp()
    torch.testing.assert_close(p.sum(0), torch.ones_like(p[0]), rtol=0, atol=1e-6)


@pytest.mark.cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_num_02_extreme_exit_logits_stay_finite(dtype: torch.dtype) -> None:
    head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.eye(VOCAB, WIDTH) * 1e4)
    o, z, labels = make_batch(dtype=dtype)
    z = torch.full_like(z, -math.inf).requires_grad_()
    loss, _ = make_loss(head)((o, z), labels, (labels != -100).sum())
    loss.backward()
    assert loss.isfinite()
    assert all(x.grad.isfinite().all() for x in (o, z, head.weight))
    plain = F.cross_entropy(head(o[-1]).float().flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, plain + 0.3, rtol=1e-6, atol=0)


def test_routers_that_never_exit_give_the_one_exit_loss_bit_for_bit() -> None:
    head = make_head(torch.float32)
    o, z, labels = make_batch(dtype=torch.float32)
    never = torch.full_like(z, -math.inf)
    mixture = make_loss(head)
    mixture._compute_weight.zero_()
    got, _ = mixture((o.detach(), never), labels, (labels != -100).sum())
    dense = make_loss(head, shape=SHAPE.dense())
    dense._compute_weight.zero_()
    want, _ = dense((o[-1:].detach(), never[:0]), labels, (labels != -100).sum())
    assert torch.equal(got, want)


def test_mixture_sums_to_one_over_the_vocabulary() -> None:
    z = torch.randn(2, 50, dtype=torch.float64) * 5
    log_pi = F.log_softmax(torch.randn(3, 50, VOCAB, dtype=torch.float64) * 3, -1)
    total = mixture_log_prob(exit_log_probs(z)[..., None], log_pi).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_mixture_loss_lies_between_the_best_and_the_worst_exit() -> None:
    z = torch.randn(3, 2000) * 4
    log_label = -torch.rand(4, 2000) * 9
    nll = -mixture_log_prob(exit_log_probs(z), log_label)
    assert (nll >= (-log_label).min(0).values - 1e-5).all()
    assert (nll <= (-log_label).max(0).values + 1e-5).all()


def test_half_and_half_routers_have_the_probabilities_of_the_docstring() -> None:
    p = exit_log_probs(torch.zeros(2, 1)).exp()[:, 0]
    torch.testing.assert_close(p, torch.tensor([0.5, 0.25, 0.25]))
    depth = expected_depth(exit_log_probs(torch.zeros(2, 1)), SHAPE.depth_fractions)
    torch.testing.assert_close(depth, torch.tensor([0.5 / 6 + 0.25 * 3 / 6 + 0.25]))


@pytest.mark.cases
@pytest.mark.parametrize("split", [8, 4, 2, 1])
def test_num_04_gradients_do_not_depend_on_the_accumulation_split(split: int) -> None:
    head = make_head(torch.float32)
    o, z, labels = make_batch(batch=8, tokens=12, dtype=torch.float32)
    for row, valid in enumerate([12, 1, 5, 0, 7, 3, 12, 2]):
        labels[row, valid:] = -100
    count = (labels != -100).sum()
    results = []
    for size in (8, split):
        for x in (o, z, head.weight):
            x.grad = None
        loss_fn, total = make_loss(head), 0.0
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            loss, _ = loss_fn((o[:, rows], z[:, rows]), labels[rows], count)
            loss.backward()
            total += loss.item()
        found = MixtureMetrics.from_sums(loss_fn.sums.tolist(), num_exits=SHAPE.num_exits)
        results.append((total, [x.grad.clone() for x in (o, z, head.weight)], found))
    (loss_a, grads_a, found_a), (loss_b, grads_b, found_b) = results
    assert loss_b == pytest.approx(loss_a, rel=1e-6)
    for a, b in zip(grads_a, grads_b, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8)
    assert found_b.exit_shares == pytest.approx(found_a.exit_shares, rel=1e-6)
    assert found_b.exit_ce == pytest.approx(found_a.exit_ce, rel=1e-6)
    assert found_b.router_means == pytest.approx(found_a.router_means, rel=1e-6)


@pytest.mark.cases
def test_num_01_micro_batch_with_no_valid_label() -> None:
    head = make_head()
    o, z, labels = make_batch()
    labels[1] = -100
    count = (labels != -100).sum()
    loss, _ = make_loss(head)((o, z), labels, count)
    loss.backward()
    alone = slow_loss(
        o[:, :1].detach(), z[:, :1].detach(), labels[:1], head.weight.detach(), phase="main"
    )
    torch.testing.assert_close(loss.double(), alone, rtol=1e-6, atol=0)
    assert not o.grad[:, 1].any()
    assert not z.grad[:, 1].any()


@pytest.mark.cases
def test_num_01_no_valid_label_anywhere_gives_zero_gradients() -> None:
    head = make_head()
    o, z, labels = make_batch()
    labels.fill_(-100)
    loss_fn = make_loss(head)
    loss, _ = loss_fn((o, z), labels, (labels != -100).sum())
    loss.backward()
    assert loss.item() == 0.0
    assert not any(x.grad.any() for x in (o, z, head.weight))
    found = MixtureMetrics.from_sums(loss_fn.sums.tolist(), num_exits=SHAPE.num_exits)
    assert found.num_tokens == 0
    assert all(math.isfinite(value) for value in (found.mixture_nll, *found.exit_shares))


def test_metrics_are_token_means() -> None:
    head = make_head()
    o, z, labels = make_batch()
    loss_fn = make_loss(head)
    loss_fn((o.detach(), z.detach()), labels)
    found = MixtureMetrics.from_sums(loss_fn.sums.tolist(), num_exits=SHAPE.num_exits)
    valid = labels != -100
    p = exit_log_probs(z.detach()).exp()
    assert found.num_tokens == int(valid.sum())
    assert found.exit_shares == pytest.approx([p[k][valid].mean().item() for k in range(3)])
    assert sum(found.exit_shares) == pytest.approx(1)
    assert found.router_means == pytest.approx(
        [torch.sigmoid(z[k])[valid].mean().item() for k in range(2)]
    )
    for k in range(3):
        ce = F.cross_entropy(head(o[k]).flatten(0, 1), labels.flatten(), ignore_index=-100)
        assert found.exit_ce[k] == pytest.approx(ce.item())
    entropy = -(p * p.log()).sum(0)[valid].mean().item()
    assert found.router_entropy == pytest.approx(entropy)


def test_phases_write_the_weights_in_place() -> None:
    loss = make_loss(make_head(), phase="warmup")
    balance, compute = loss._balance_weight, loss._compute_weight
    pointers = balance.data_ptr(), compute.data_ptr()
    assert (balance.item(), compute.item()) == pytest.approx((0.7, 0.0))
    loss.start_step(6, num_steps=100)
    assert (loss._balance_weight.item(), loss._compute_weight.item()) == pytest.approx((0.0, 0.3))
    assert (loss._balance_weight.data_ptr(), loss._compute_weight.data_ptr()) == pointers


@pytest.mark.parametrize(
    ("step", "warmup_steps", "want"),
    [(1, 0, (0.0, 2.0)), (1, 1, (1.0, 0.0)), (2, 1, (0.0, 2.0)), (5, 50, (1.0, 0.0))],
)
def test_phase_weights(step: int, warmup_steps: int, want: tuple[float, float]) -> None:
    assert phase_weights(step, warmup_steps=warmup_steps, alpha=1.0, beta=2.0) == want


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta": -1.0}, r"beta=-1.0: must be finite and >= 0"),
        ({"alpha": math.nan}, r"alpha=nan: must be finite"),
        ({"warmup_fraction": 1.5}, r"warmup_fraction=1.5: must lie in \[0, 1\]"),
        ({"num_chunks": 0}, r"num_chunks=0: must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixtureLoss.Config(**setting)


def test_logits_of_all_exits_for_all_tokens_never_exist_at_once() -> None:
    rows = []

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(x.numel() // WIDTH)
            return super().forward(x)

    head = Head(WIDTH, VOCAB, bias=False, dtype=torch.float64)
    o, z, labels = make_batch(batch=2, tokens=24)
    loss, _ = make_loss(head, num_chunks=6)((o, z), labels, (labels != -100).sum())
    loss.backward()
    # Every exit state passes once: 3 exits x 48 tokens in 6 calls of 3 x 2 x 4 rows.
    assert rows == [24] * 6
