"""`nvium bench train`: what a training step of N-vium costs beside one of dense."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nvium_titan.cli.common import check_at_least, command_line, counted, progress
from nvium_titan.errors import BenchError

if TYPE_CHECKING:
    from nvium_titan.bench.training import TrainComparison


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Measure what a training step costs beside a dense model's, in one process, taking turns.

    A step is forward, loss and backward on random tokens, without optimizer or recomputation.
    Dense is the same width and depth with one exit and no adapter. Close everything else first, or
    the figures show nothing.

    nvium bench train --config-file train_configs/quadrivium-768x24.toml
    """

    config_file: Path
    """The TOML file of a training run: its model, [loss] and [training] seq_len."""

    pairs: int = 5
    """Pairs: rounds in which every model makes one step."""

    batch: int = 1
    """Sequences of a step."""

    seq_len: int | None = None
    """Tokens of each; default: those of the file."""

    twin: bool = False
    """Also run a dense model with as many parameters (a wider MLP)."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of weights and activations; default: float32 on the CPU, otherwise bfloat16."""

    device: str | None = None
    """cpu, cuda or cuda:N; default: the GPU if there is one."""

    compile: bool = False
    """Compile each layer, as [compile] enable = true does."""

    threads: int | None = None
    """CPU threads; default: torch's."""

    seed: int = 0
    """Decides weights and tokens."""

    profile: Path | None = None
    """Folder for a torch profiler trace of one step of each model."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Measure and print; after Ctrl-C, what there is so far.

        Raises:
            BenchError: If a number is impossible, or there is no such device.
            ConfigError: If the file is wrong.
            KeyboardInterrupt: After the figures of an interrupted run have been printed.
        """
        from nvium_titan.train import compat

        compat.require_torchtitan()
        compat.use_cpu_without_accelerator()
        import torch

        from nvium_titan.bench.machine import describe_cpu
        from nvium_titan.cli.bench_tables import show, warn_if_busy

        comparison = self._comparison()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        cpu = describe_cpu()
        warn_if_busy(cpu)
        systems = comparison.systems()
        with progress("steps", total=comparison.num_runs) as report_done:
            report = comparison.measure(
                systems, cpu=cpu, command=command_line(), on_run=counted(report_done)
            )
        show(report, as_json=self.json)
        if not report.is_complete:
            raise KeyboardInterrupt
        if self.profile is not None:
            self.profile.mkdir(parents=True, exist_ok=True)
            for system in systems:
                path = self.profile / f"{system.name}.json"
                system.profile(path)
                print(f"wrote {path}", file=sys.stderr)

    def _comparison(self) -> TrainComparison:
        import torch

        from nvium_titan.bench.training import TrainComparison
        from nvium_titan.train.config import load_config
        from nvium_titan.train.trainer import NviumTrainer

        check_at_least(self, BenchError, pairs=1, batch=1, seq_len=1, threads=1)
        has_gpu = torch.cuda.is_available()
        device = self.device or ("cuda" if has_gpu else "cpu")
        if device.startswith("cuda") and not has_gpu:
            raise BenchError(f"--device {device}: torch sees no CUDA GPU here; use cpu")
        config = load_config(NviumTrainer.Config(), self.config_file)
        shape = config.model_spec.model.shape
        seq_len = self.seq_len or config.training.seq_len
        if seq_len > shape.max_seq_len:
            raise BenchError(
                f"--seq-len {seq_len}: the model is declared for max_seq_len={shape.max_seq_len}"
            )
        if not shape.exit_layers:
            raise BenchError(
                f"{self.config_file}: a model with one exit is dense; give the file of an N-vium"
            )
        dtype = self.dtype or ("float32" if device == "cpu" else "bfloat16")
        return TrainComparison(
            config_file=self.config_file,
            shape=shape,
            loss=config.loss,
            batch=self.batch,
            seq_len=seq_len,
            dtype=getattr(torch, dtype),
            device=torch.device(device),
            compiles=self.compile,
            with_twin=self.twin,
            num_pairs=self.pairs,
            seed=self.seed,
        )
