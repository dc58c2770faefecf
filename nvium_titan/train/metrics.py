"""Metrics: their names, units and sums; the console, TensorBoard and `metrics.jsonl`.

The loss adds up sums over valid tokens in one device tensor. Here they are added up over the
data-parallel ranks and divided by the number of valid tokens of all of them. No figure is a mean of
means, so neither accumulation nor data parallelism changes one.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from nvium_titan.core.cost import limit_speedup
from nvium_titan.files import replacing
from nvium_titan.logs import takes_colours
from nvium_titan.train.objective import TokenTerms

COLLAPSE_LIMIT = 0.95
"""Router collapse is reported when one exit has more than this share of the probability."""


def sum_sizes(num_exits: int) -> dict[str, int]:
    """Return how many sums each figure of `MixtureMetrics` has, in the order of `token_sums`.

    Args:
        num_exits: Exits of the model, the final one included.
    """
    return {
        "num_tokens": 1,
        "mixture_nll": 1,
        "expected_depth": 1,
        "balance": 1,
        "router_entropy": 1,
        "exit_ce": num_exits,
        "exit_shares": num_exits,
        "router_means": num_exits - 1,
    }


def token_sums(
    terms: TokenTerms, router_logit_J: Tensor, log_label_E: Tensor, valid: Tensor
) -> Tensor:
    """Return the sums over valid tokens behind `MixtureMetrics`.

    Args:
        terms: The objective's parts, shape (*).
        router_logit_J: z, shape (J, *).
        log_label_E: log pi_k(y), shape (E, *).
        valid: 1 where the label counts and 0 elsewhere, shape (*).

    Returns:
        Shape (S,), float64, in the order of `sum_sizes`.
    """
    p_E = terms.log_exit_E.exp()
    rows: dict[str, Iterable[Tensor]] = {
        "num_tokens": [torch.ones_like(terms.mixture_nll)],
        "mixture_nll": [terms.mixture_nll],
        "expected_depth": [terms.expected_depth],
        "balance": [terms.balance],
        "router_entropy": [-torch.special.xlogy(p_E, p_E).sum(dim=0)],
        "exit_ce": -log_label_E,
        "exit_shares": p_E,
        "router_means": torch.sigmoid(router_logit_J),
    }
    ordered = [row for name in sum_sizes(len(p_E)) for row in rows[name]]
    return torch.stack([(row * valid).sum(dtype=torch.float64) for row in ordered])


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureMetrics:
    """Means over valid tokens."""

    num_tokens: int
    """Valid tokens behind the means."""
    mixture_nll: float
    """L_mix, nats/token."""
    expected_depth: float
    """Fraction of num_layers."""
    balance: float
    """L_balance."""
    router_entropy: float
    """Entropy of the exit distribution, nats, at most log N_V."""
    exit_ce: list[float]
    """Cross-entropy of each exit alone, nats/token."""
    exit_shares: list[float]
    """Mean exit probability p_k."""
    router_means: list[float]
    """Mean conditional probability w_k of leaving, one per junction."""

    @property
    def perplexity(self) -> float:
        """exp(L_mix); infinite above the largest float."""
        return math.exp(self.mixture_nll) if self.mixture_nll < 700 else math.inf

    @classmethod
    def from_sums(cls, sums: Sequence[float], *, num_exits: int) -> MixtureMetrics:
        """Return the means of reduced `token_sums`; without tokens all are 0."""
        values = iter(sums)
        found = {name: list(islice(values, size)) for name, size in sum_sizes(num_exits).items()}
        (count,) = found.pop("num_tokens")
        means = {name: [v / max(count, 1.0) for v in part] for name, part in found.items()}
        return cls(
            num_tokens=round(count),
            mixture_nll=means["mixture_nll"][0],
            expected_depth=means["expected_depth"][0],
            balance=means["balance"][0],
            router_entropy=means["router_entropy"][0],
            exit_ce=means["exit_ce"],
            exit_shares=means["exit_shares"],
            router_means=means["router_means"],
        )


class NviumMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics and the mixture's, for console, TensorBoard and `metrics.jsonl`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's metrics settings, with TensorBoard on by default."""

        enable_tensorboard: bool = True
        """Whether to write TensorBoard events to the dump folder."""

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        # torchtitan logs to stdout, in colours wherever that leads.
        if not takes_colours(sys.stdout):
            self.color = NoColor()
        self.writer_rank = _get_metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=kwargs.get("pp_schedule", "1F1B")
        )
        self._writes = torch.distributed.get_rank() == self.writer_rank
        self.path = Path(dump_folder) / "metrics.jsonl"
        self.loss_fn: Any = None
        self._warned_collapse = False
        self.validated_step = 0
        self.validation_nll = math.nan

    def drop_after(self, step: int, *, validates_again: bool) -> None:
        """Drop the rows that an interrupted run wrote after the checkpoint it resumes from.

        Args:
            step: The restored step; 0 drops all rows.
            validates_again: Whether to drop the validation of that step too.
        """
        if not self._writes or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            if not line.endswith("}"):  # the process was killed while it wrote
                continue
            row = json.loads(line)
            is_again = validates_again and row["step"] == step and row["split"] == "val"
            if row["step"] <= step and not is_again:
                kept.append(line)
        with replacing(self.path) as file:
            file.writelines(f"{line}\n".encode() for line in kept)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step; every rank calls it."""
        extra = dict(extra_metrics or {})
        found = self._reduced()
        rate = self._tokens_per_second()
        if not math.isfinite(global_max_loss):  # a rank without valid labels divided 0 by 0
            global_max_loss = global_avg_loss
        lr = next((v for k, v in extra.items() if k.startswith("lr/")), None)
        tokens = int(extra["n_tokens_seen"])
        extra |= self._scalars(found)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=extra)
        self._report(
            found, step=step, split="train", loss=global_avg_loss, grad_norm=grad_norm, lr=lr,
            tokens=tokens, tokens_per_s=rate,
        )  # fmt: skip

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log one validation; every rank calls it."""
        found = self._reduced()
        self.validated_step, self.validation_nll = step, found.mixture_nll
        rate = self._tokens_per_second()
        extra = {f"validation_metrics/{k}": v for k, v in self._scalars(found).items()}
        super().log_validation(loss, step, extra_metrics={**(extra_metrics or {}), **extra})
        self._report(
            found, step=step, split="val", loss=loss, grad_norm=None, lr=None,
            tokens=found.num_tokens, tokens_per_s=rate,
        )  # fmt: skip

    def _reduced(self) -> MixtureMetrics:
        mesh = self.parallel_dims.get_optional_mesh("loss")
        sums: Tensor = self.loss_fn.sums
        if mesh is not None:
            sums = dist_utils.dist_sum_tensor(sums, mesh)
        return MixtureMetrics.from_sums(sums.tolist(), num_exits=self.loss_fn.shape.num_exits)

    def _tokens_per_second(self) -> float:
        seconds = time.perf_counter() - self.time_last_log
        per_rank = self.ntokens_since_last_log / seconds
        data_ranks = self.parallel_dims.world_size / self.parallel_dims.non_data_parallel_size
        return per_rank * data_ranks

    def _limit(self, found: MixtureMetrics) -> float | None:
        if not found.num_tokens:
            return None
        total = sum(found.exit_shares)
        return limit_speedup(self.loss_fn.shape, [share / total for share in found.exit_shares])

    def _scalars(self, found: MixtureMetrics) -> dict[str, float]:
        scalars = {
            "nvium/mixture_nll": found.mixture_nll,
            "nvium/perplexity": found.perplexity,
            "nvium/expected_depth": found.expected_depth,
            "nvium/balance": found.balance,
            "nvium/router_entropy": found.router_entropy,
            "nvium/beta": self.loss_fn.compute_weight,
        }
        for k, (ce, share) in enumerate(zip(found.exit_ce, found.exit_shares, strict=True), 1):
            scalars |= {f"nvium/exit_ce/{k}": ce, f"nvium/exit_share/{k}": share}
        for k, w in enumerate(found.router_means, 1):
            scalars[f"nvium/router_mean/{k}"] = w
        limit = self._limit(found)
        return scalars if limit is None else scalars | {"nvium/limit_speedup": limit}

    def _report(self, found: MixtureMetrics, *, step: int, split: str, **row: Any) -> None:
        if self.loss_fn.lm_head is None:  # a pipeline stage without a loss has no figures
            return
        limit = self._limit(found)
        shares = " ".join(f"{share:.3f}" for share in found.exit_shares)
        logger.info(
            "%s step %d: perplexity %.2f, exit shares %s, expected depth %.3f, "
            "decode speed-up limit %s",
            split, step, found.perplexity, shares, found.expected_depth,
            "-" if limit is None else f"{limit:.2f}x",
        )  # fmt: skip
        self._warn_of_collapse(found, step)
        if not self._writes:
            return
        record = {
            "step": step,
            "split": split,
            "loss": row.pop("loss"),
            "mixture_nll": found.mixture_nll,
            "perplexity": found.perplexity,
            "exit_ce": found.exit_ce,
            "exit_shares": found.exit_shares,
            "expected_depth": found.expected_depth,
            "beta": self.loss_fn.compute_weight,
            "router_means": found.router_means,
            "router_entropy": found.router_entropy,
            **row,
            "limit_speedup": limit,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _warn_of_collapse(self, found: MixtureMetrics, step: int) -> None:
        share = max(found.exit_shares)
        collapsed = len(found.exit_shares) > 1 and share > COLLAPSE_LIMIT
        if collapsed and not self._warned_collapse:
            logger.warning(
                "step %d: router collapse, exit %d has %.1f%% of the probability (over %.0f%%); "
                "lower [loss] beta or raise warmup_fraction",
                step, found.exit_shares.index(share) + 1, 100 * share, 100 * COLLAPSE_LIMIT,
            )  # fmt: skip
        self._warned_collapse = collapsed
