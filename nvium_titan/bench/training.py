"""`nvium bench train`: steps of N-vium, dense and the matched twin, in turns.

A step is forward, loss and backward of one micro-batch, as the trainer runs them, without optimizer
and without activation checkpointing, whose second forward is not among the FLOPs. Every model has
the training loss: dense is an N-vium with one exit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvium_titan.bench.machine import device_name, package_versions, peak_flops, wait_for
from nvium_titan.bench.memory import LiveBytes
from nvium_titan.bench.pairs import count_runs, paired_ratio, quartiles, run_pairs
from nvium_titan.core.cost import count_params, forward_flops
from nvium_titan.core.flavors import dense_twin
from nvium_titan.core.shape import ModelShape
from nvium_titan.report.bench_records import Cpu, LossMemory, StepFigures, StepRatio, TrainReport
from nvium_titan.train.loss import MixtureLoss
from nvium_titan.train.model import model_spec

if TYPE_CHECKING:
    from nvium_titan.train.model.model import NviumModel

_FORWARDS_PER_STEP = 3
"""A backward pass has the matmuls of two forward passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainComparison:
    """What to compare, and how."""

    config_file: Path
    """The file of the training run, for the report."""
    shape: ModelShape
    """The N-vium."""
    loss: MixtureLoss.Config
    """Its loss; every model has its number of chunks."""
    batch: int
    """Sequences of a step."""
    seq_len: int
    """Tokens of each."""
    dtype: torch.dtype
    """Type of weights and activations."""
    device: torch.device
    """Where to run."""
    compiles: bool
    """Whether to compile each layer."""
    with_twin: bool
    """Whether to run the parameter-matched dense model."""
    num_pairs: int
    """Pairs to run."""
    seed: int
    """Decides weights and tokens."""

    def models(self) -> dict[str, ModelShape]:
        """Return the shapes to run, by name, N-vium first."""
        models = {"N-vium": self.shape, "dense": self.shape.dense()}
        return models | {"twin": dense_twin(self.shape)} if self.with_twin else models

    @property
    def num_runs(self) -> int:
        """Steps of all models, warm-up included."""
        return count_runs(len(self.models()), self.num_pairs)

    @property
    def dtype_name(self) -> str:
        """The type, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    def systems(self) -> list[TrainingSystem]:
        """Return the models with their losses, N-vium first."""
        return [TrainingSystem(name, shape, self) for name, shape in self.models().items()]

    def measure(
        self,
        systems: Sequence[TrainingSystem],
        *,
        cpu: Cpu,
        command: str,
        on_run: Callable[[], None],
    ) -> TrainReport:
        """Measure the loss, then run all pairs; an interrupt (Ctrl-C) ends them.

        Args:
            systems: From `systems`.
            cpu: For the report.
            command: For the report.
            on_run: Called after every step, warm-up included.

        Raises:
            KeyboardInterrupt: If interrupted before the first pair is complete.
        """
        loss_memory = measure_loss_memory(self)
        pairs = run_pairs(
            systems, range(self.num_pairs), lambda system, _: system.run(), on_run=on_run
        )
        times = zip(*pairs, strict=True)
        return TrainReport(
            config_file=str(self.config_file),
            exits=list(self.shape.block_ends),
            batch=self.batch,
            seq_len=self.seq_len,
            dtype=self.dtype_name,
            device=device_name(self.device),
            is_compiled=self.compiles,
            num_pairs_wanted=self.num_pairs,
            num_pairs=len(pairs),
            seed=self.seed,
            threads=torch.get_num_threads(),
            cpu=cpu,
            versions=package_versions(),
            command=command,
            systems=[system.figures(t) for system, t in zip(systems, times, strict=True)],
            ratios=step_ratios(systems, pairs),
            loss_memory=loss_memory,
        )


class TrainingSystem:
    """One model with its loss, ready to make steps on one fixed micro-batch."""

    def __init__(self, name: str, shape: ModelShape, comparison: TrainComparison) -> None:
        self.name, self.shape, self._comparison = name, shape, comparison
        torch.manual_seed(comparison.seed)
        with torch.device(comparison.device):
            self._model: NviumModel = model_spec(shape, flavor=name).model.build()
            with torch.no_grad():
                self._model.init_weights(buffer_device=None)
            batch = (comparison.batch, comparison.seq_len)
            self._tokens_BT = torch.randint(shape.vocab_size, batch)
            self._labels_BT = torch.randint(shape.vocab_size, batch)
            self._positions_BT = torch.arange(comparison.seq_len).expand(batch)
            self._num_valid = torch.tensor(self._labels_BT.numel())
        for parameter in self._model.parameters():
            # Not the buffers: rotary frequencies are complex.
            parameter.data = parameter.data.to(comparison.dtype)
        if comparison.compiles:
            for layer in self._model.layers.values():
                layer.compile(fullgraph=True)
        self._loss = make_loss(
            self._model.lm_head, shape, config=comparison.loss, device=comparison.device
        )

    def run(self) -> float:
        """Make a step and return its seconds; clearing the gradients is not timed."""
        self._model.zero_grad(set_to_none=True)
        wait_for(self._comparison.device)
        start = time.perf_counter()
        masks = self._model.get_attention_masks(self._positions_BT)
        pred = self._model(self._tokens_BT, positions=self._positions_BT, attention_masks=masks)
        loss, _ = self._loss(pred, self._labels_BT, self._num_valid)
        torch.autograd.backward(loss)
        wait_for(self._comparison.device)
        return time.perf_counter() - start

    def profile(self, path: Path) -> None:
        """Write the trace of one step, for chrome://tracing or Perfetto."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._comparison.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as trace:
            self.run()
        trace.export_chrome_trace(str(path))

    @property
    def flops_per_step(self) -> int:
        """Floating-point operations of a step."""
        comparison = self._comparison
        per_token = sum(forward_flops(self.shape, seq_len=comparison.seq_len).values())
        return _FORWARDS_PER_STEP * per_token * comparison.batch * comparison.seq_len

    def figures(self, times_s: Sequence[float]) -> StepFigures:
        """Return the figures of all its steps."""
        ms = quartiles([1000 * seconds for seconds in times_s])
        comparison = self._comparison
        peak = peak_flops(device_name(comparison.device), dtype=comparison.dtype_name)
        return StepFigures(
            name=self.name,
            num_params=sum(count_params(self.shape).values()),
            tflops=self.flops_per_step / 1e12,
            step_ms=ms,
            tokens_per_s=1000 * comparison.batch * comparison.seq_len / ms.median,
            mfu=None if peak is None else self.flops_per_step / (ms.median / 1000 * peak),
        )


def make_loss(
    head: torch.nn.Module, shape: ModelShape, *, config: MixtureLoss.Config, device: torch.device
) -> MixtureLoss:
    """Return the training loss of a shape, past the router warm-up."""
    loss = MixtureLoss(config)
    loss.bind(head, shape, device=device)
    loss.start_step(1, num_steps=0)
    return loss


def step_ratios(
    systems: Sequence[TrainingSystem], pairs: Sequence[Sequence[float]]
) -> list[StepRatio]:
    """Return what a step of the first system costs beside one of each other."""
    ours, *others = systems
    our_times, *other_times = zip(*pairs, strict=True)
    ratios = []
    for other, times in zip(others, other_times, strict=True):
        found = paired_ratio(other.name, our_times, times)
        flop_ratio = ours.flops_per_step / other.flops_per_step
        ratios.append(StepRatio(time=found, flop_ratio=flop_ratio, cost=found.ratio / flop_ratio))
    return ratios


def measure_loss_memory(comparison: TrainComparison) -> LossMemory:
    """Return the peaks of the mixture loss and of a dense loss with as many live logits."""
    shape, seq_len = comparison.shape, comparison.seq_len
    num_exits = shape.num_exits
    chunk = math.ceil(seq_len / comparison.loss.num_chunks)
    dense_chunk = min(seq_len, num_exits * chunk)
    dense_loss = dataclasses.replace(comparison.loss, num_chunks=math.ceil(seq_len / dense_chunk))
    nvium_bytes = _loss_peak(comparison, shape, comparison.loss)
    dense_bytes = _loss_peak(comparison, shape.dense(), dense_loss)
    return LossMemory(
        live_logit_rows=comparison.batch * num_exits * chunk,
        nvium_mb=nvium_bytes / 1e6,
        dense_mb=dense_bytes / 1e6,
        ratio=nvium_bytes / dense_bytes,
    )


def _loss_peak(comparison: TrainComparison, shape: ModelShape, config: MixtureLoss.Config) -> int:
    torch.manual_seed(comparison.seed)
    with torch.device(comparison.device):
        head = torch.nn.Linear(shape.dim, shape.vocab_size, bias=False, dtype=comparison.dtype)
        batch = (comparison.batch, comparison.seq_len)
        labels_BT = torch.randint(shape.vocab_size, batch)
        num_exits = shape.num_exits
        o_EBTD = torch.randn(num_exits, *batch, shape.dim, dtype=comparison.dtype)
        z_JBT = torch.randn(num_exits - 1, *batch)
    loss = make_loss(head, shape, config=config, device=comparison.device)
    return loss_peak_bytes(loss, (o_EBTD.requires_grad_(), z_JBT.requires_grad_()), labels_BT)


def loss_peak_bytes(loss: MixtureLoss, pred: tuple[Tensor, Tensor], labels_BT: Tensor) -> int:
    """Return the peak bytes of what a loss and its backward make.

    Exit states and their gradients do not count: they are the model's.

    Args:
        loss: With its head.
        pred: Exit states (E, B, T, D) and router logits (J, B, T), leaves that take gradients.
        labels_BT: Next tokens, (B, T).
    """
    num_valid = torch.tensor(labels_BT.numel(), device=labels_BT.device)
    live = LiveBytes()
    with live:
        value, _ = loss(pred, labels_BT, num_valid)
        torch.autograd.backward(value)
    return live.peak - pred[0].nbytes
