"""What the mixture loss holds at its peak: bytes of live tensors, counted by storage."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nvium_titan.bench.memory import LiveBytes
from nvium_titan.bench.training import loss_peak_bytes, make_loss
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.train.loss import MixtureLoss

VOCAB = 32000
WIDTH = 32


def shape_of(num_exits: int) -> ModelShape:
    return replace(
        flavor_shape("debug"), vocab_size=VOCAB, dim=WIDTH, num_layers=4,
        exit_layers=tuple(range(1, num_exits)),
    )  # fmt: skip


def make_batch(num_exits: int, *, batch: int, tokens: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    o = torch.randn(num_exits, batch, tokens, WIDTH, requires_grad=True)
    z = torch.randn(num_exits - 1, batch, tokens, requires_grad=True)
    return (o, z), torch.randint(VOCAB, (batch, tokens))


def loss_of(num_exits: int, *, num_chunks: int) -> MixtureLoss:
    torch.manual_seed(1)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    config = MixtureLoss.Config(num_chunks=num_chunks)
    return make_loss(head, shape_of(num_exits), config=config, device=torch.device("cpu"))


def peak_of(num_exits: int, *, batch: int, tokens: int, num_chunks: int) -> int:
    pred, labels = make_batch(num_exits, batch=batch, tokens=tokens)
    return loss_peak_bytes(loss_of(num_exits, num_chunks=num_chunks), pred, labels)


def run_loss(num_exits: int, *, num_chunks: int) -> list[Tensor]:
    """Loss, gradients of exit states, router logits and head, for 4 x 24 tokens."""
    pred, labels = make_batch(num_exits, batch=4, tokens=24)
    labels[0, 3:7] = -100
    loss = loss_of(num_exits, num_chunks=num_chunks)
    value, _ = loss(pred, labels, (labels != -100).sum())
    value.backward()
    assert loss.lm_head is not None
    return [value.detach(), *(x.grad for x in pred if x.numel()), loss.lm_head.weight.grad]


def assert_equal_to(found: list[Tensor], expected: list[Tensor], *, tolerance: float) -> None:
    for got, want in zip(found, expected, strict=True):
        atol = tolerance * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_live_bytes_counts_each_storage_once_and_as_long_as_it_lives() -> None:
    before = torch.ones(100)
    with LiveBytes() as live:
        a = torch.zeros(1000)
        view = a.view(10, 100)[3:5]
        before.add_(1)
        assert live.now == live.peak == 4000
        leaf = torch.ones(1000, requires_grad=True)
        out = leaf.exp()  # saved for the backward pass
        assert live.now == 12000
        loss = out.sum()
        del out, a
        assert live.now == 12004
        del view
        assert live.now == 8004
        loss.backward()
        # The gradient is there; what exp had saved is gone.
        assert live.now == 8004
        assert live.peak > 12004
        del loss
    assert live.now == 8000


@pytest.mark.parametrize("num_exits", [1, 4])
def test_a_chunk_s_logits_exist_once(num_exits: int) -> None:
    """Log-probabilities and the gradient take the memory of the logits."""
    peak = peak_of(num_exits, batch=4, tokens=128, num_chunks=4)
    logits = 4 * num_exits * 4 * 32 * VOCAB
    head_gradients = 2 * 4 * VOCAB * WIDTH  # a chunk's and their sum
    assert logits < peak < 1.02 * (logits + head_gradients)


@pytest.mark.parametrize(
    ("tokens", "num_chunks"), [(128, 8), pytest.param(2048, 64, marks=pytest.mark.slow)]
)
def test_the_peak_is_that_of_dense_at_as_many_live_logits(tokens: int, num_chunks: int) -> None:
    """4 exits, vocabulary 32000, 4 sequences; exit states and their gradients are left out."""
    ours = peak_of(4, batch=4, tokens=tokens, num_chunks=num_chunks)
    dense = peak_of(1, batch=4, tokens=tokens, num_chunks=num_chunks // 4)
    rows = 4 * 4 * math.ceil(tokens / num_chunks)
    assert ours > 4 * rows * VOCAB  # a float32 logit of each live row at least
    assert ours < 1.25 * dense


@pytest.mark.cases
def test_cmp_04_logits_of_all_exits_do_not_add_up() -> None:
    full = 4 * 4 * 64 * VOCAB  # bytes of one exit's logits for all tokens
    chunked = [peak_of(n, batch=4, tokens=64, num_chunks=8) for n in (1, 2, 3, 4)]
    growth = [after - before for before, after in itertools.pairwise(chunked)]
    assert max(growth) < full / 2
    assert peak_of(4, batch=4, tokens=64, num_chunks=1) > 4 * full > chunked[-1]
    for num_exits in (1, 4):
        whole = run_loss(num_exits, num_chunks=1)
        for num_chunks in (5, 8, 24):
            assert_equal_to(run_loss(num_exits, num_chunks=num_chunks), whole, tolerance=1e-6)
