"""`NviumTrainer`: what differs from torchtitan's trainer.

The training step is torchtitan's: batches, forward, `MixtureLoss`, backward, clipping, optimizer.
Before it the loss is given its weights; after it the figures are checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError, DataError, DivergenceError, StreamError
from nvium_titan.text.tokenizer import check_vocabulary
from nvium_titan.train.checkpoint import NviumCheckpointManager
from nvium_titan.train.config import dump_config
from nvium_titan.train.config.tables import Float8Table, ModelTable, NviumTable, resolve_shape
from nvium_titan.train.controller import Baseline, next_beta
from nvium_titan.train.data.agreement import host_group, in_step
from nvium_titan.train.data.loader import Batch, TextDataLoader
from nvium_titan.train.data.tokenizers import TextTokenizer
from nvium_titan.train.loss import MixtureLoss
from nvium_titan.train.metrics import NviumMetricsProcessor
from nvium_titan.train.model import model_spec
from nvium_titan.train.model.float8 import use_float8
from nvium_titan.train.model.layout import check_layout
from nvium_titan.train.model.parallelize import check_device
from nvium_titan.train.optimizer import AdamW, LRSchedule, OptimizerConfig
from nvium_titan.train.validator import NviumValidator


class _RunState(Stateful):
    """What a checkpoint says about the run that wrote it, beyond torchtitan's own state."""

    # The phase of the loss is not here: it follows from the step.

    def __init__(
        self, *, num_steps: int, settings: str, batch_size: int, loss_fn: MixtureLoss
    ) -> None:
        self.loss_fn = loss_fn
        self.num_steps = num_steps
        self.settings = settings
        self.batch_size = batch_size
        self.previous_num_steps = num_steps
        self.previous_batch_size = batch_size

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "settings": self.settings,
            "batch_size": self.batch_size,
            "beta": self.loss_fn.beta,
            # Training draws no random numbers; what a user adds may.
            "random_state": torch.get_rng_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_num_steps = state_dict["num_steps"]
        self.previous_batch_size = state_dict["batch_size"]
        if self.loss_fn.config.controller.baseline:
            self.loss_fn.beta = state_dict["beta"]
        torch.set_rng_state(state_dict["random_state"])


class NviumTrainer(Trainer):
    """Trains an N-vium, or with one exit the dense transformer, on torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration, the tables `[model]` and `[nvium]`, and our components."""

        model: ModelTable = field(default_factory=ModelTable)
        nvium: NviumTable = field(default_factory=NviumTable)
        float8: Float8Table = field(default_factory=Float8Table)
        loss: MixtureLoss.Config = field(default_factory=MixtureLoss.Config)
        optimizer: OptimizerConfig = field(default_factory=AdamW.Config)
        lr_scheduler: LRSchedule.Config = field(default_factory=LRSchedule.Config)
        # By default a run is repeatable, and writes no logs that nobody asked for.
        debug: DebugConfig = field(
            default_factory=lambda: DebugConfig(seed=42, enable_structured_logging=False)
        )
        # The paper's context (App. A).
        training: TrainingConfig = field(default_factory=lambda: TrainingConfig(seq_len=1024))
        tokenizer: TextTokenizer.Config = field(default_factory=TextTokenizer.Config)
        dataloader: TextDataLoader.Config = field(default_factory=TextDataLoader.Config)
        validator: NviumValidator.Config = field(default_factory=NviumValidator.Config)
        metrics: NviumMetricsProcessor.Config = field(default_factory=NviumMetricsProcessor.Config)
        checkpoint: NviumCheckpointManager.Config = field(
            default_factory=NviumCheckpointManager.Config
        )

        def __post_init__(self) -> None:
            """Build the model spec from the tables and check the settings against each other.

            Raises:
                ConfigError: If the model is impossible or does not fit the training settings.
            """
            shape = resolve_shape(self.model, self.nvium)
            if self.training.seq_len > shape.max_seq_len:
                raise ConfigError(
                    f"[training] seq_len={self.training.seq_len}: must be at most "
                    f"max_seq_len={shape.max_seq_len}; lower it or raise [model] max_seq_len"
                )
            if self.nvium.trainable == "junctions" and not shape.exit_layers:
                raise ConfigError(
                    '[nvium] trainable="junctions": the model has no early exit; set exit_layers'
                )
            check_layout(
                shape,
                parallelism=self.parallelism,
                training=self.training,
                trainable=self.nvium.trainable,
            )
            if self.loss.controller.baseline and not self.validator.enable:
                raise ConfigError(
                    "[loss.controller] baseline: beta follows the validation loss; set [validator] "
                    "enable = true"
                )
            if isinstance(self.lr_scheduler, LRSchedule.Config):
                self.lr_scheduler.resolve(self.training.steps)
            # A field of torchtitan's, whose classes are untyped.
            self.model_spec = model_spec(  # type: ignore[misc]
                shape, flavor=self.model.flavor, trainable=self.nvium.trainable
            )
            Trainer.Config.__post_init__(self)

        def resolved(self) -> NviumTrainer.Config:
            """Return the same settings, with every number of the model filled in."""
            shape = self.model_spec.model.shape
            numbers = {f.name: getattr(shape, f.name) for f in fields(ModelTable)[1:]}
            return replace(
                self,
                model=ModelTable(flavor=self.model.flavor, **numbers),
                nvium=NviumTable(
                    num_exits=shape.num_exits,
                    exit_layers=list(shape.exit_layers),
                    router_dim=shape.router_dim,
                    adapter_dim=shape.adapter_dim,
                    trainable=self.nvium.trainable,
                ),
            )

    def __init__(self, config: Config) -> None:
        # Gradients of a softmax over a large vocabulary hold denormal numbers, on which a CPU's
        # products crawl. It is a setting of threads, which those that they start inherit.
        torch.set_flush_denormal(True)
        check_device(parallelism=config.parallelism, training=config.training)
        if config.float8.enable:
            is_compiled = config.compile.enable and "model" in config.compile.components
            use_float8(config.model_spec.model, config.float8, is_compiled=is_compiled)
        super().__init__(config)
        shape: ModelShape = config.model_spec.model.shape
        check_vocabulary(self.tokenizer, shape.vocab_size)
        has_head = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        self.loss_fn.bind(
            self.model_parts[-1].lm_head if has_head else None,
            shape,
            device=self.device,
        )
        self.metrics_processor.loss_fn = self.loss_fn
        self._run_state = _RunState(
            num_steps=config.training.steps,
            settings=dump_config(config.resolved()),
            batch_size=self._batch_size(),
            loss_fn=self.loss_fn,
        )
        baseline = config.loss.controller.baseline
        self._baseline = Baseline.read(baseline) if baseline else None
        if self.checkpointer.enable:
            self.checkpointer.states["nvium"] = self._run_state
        self._hosts = host_group()
        if config.validator.enable:
            self.validator.bind(self._hosts)
        self._first_bad_step = torch.zeros((), dtype=torch.int64, device=self.device)
        self._started = False
        self._asked_to_stop: int | None = None
        self.stopped_by: int | None = None

    def should_continue_training(self) -> bool:
        """Return whether to train another step; the first call follows the checkpoint's loading."""
        if not self._started:
            self._started = True
            self._start()
        self._adapt_beta()
        if not super().should_continue_training():
            return False
        signal_number = self._agreed_stop()
        if signal_number is None:
            return True
        self._save_now()
        self.stopped_by = signal_number
        logger.warning("stopped by a signal after step %d", self.step)
        return False

    def request_stop(self, signal_number: int) -> None:
        """Ask all ranks to save and stop within two steps; safe in a signal handler.

        Args:
            signal_number: The signal; `stopped_by` holds it on every rank once all have stopped.
        """
        self._asked_to_stop = signal_number

    def _agreed_stop(self) -> int | None:
        """Return the signal to stop for, at the step that all ranks agree on; never waits."""
        # A host may launch a step before the collectives of the last one are done, so a rank is at
        # most two steps ahead of what another one writes here.
        store = torch.distributed.distributed_c10d._get_default_store()
        if self._asked_to_stop is not None:
            last = self.step + (2 if torch.distributed.get_world_size() > 1 else 0)
            store.compare_set("nvium/stop", "", f"{last} {self._asked_to_stop}")
        if not store.check(["nvium/stop"]):
            return None
        last, signal_number = map(int, store.get("nvium/stop").split())
        return signal_number if self.step >= last else None

    def _save_now(self) -> None:
        """Save all that a run needs to resume, unless the interval has saved this step already."""
        manager = self.checkpointer
        if not manager.enable or not self.step or manager._should_save(self.step):
            return
        self._check_finite(parameters=True)
        # Only the last step of a whole run may be saved as weights alone.
        manager.last_save_model_only = manager.last_save_in_hf = False
        manager.save(self.step, last_step=True)

    def _batch_size(self) -> int:
        """Return the sequences in a step, over all ranks."""
        training, dims = self.config.training, self.parallel_dims
        if training.global_batch_size > 0:
            return int(training.global_batch_size)
        return int(training.local_batch_size * dims.dp_replicate * dims.dp_shard)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the tokens that all ranks have seen."""
        # Not this rank's own: the number of ranks may change.
        mesh = self.parallel_dims.get_optional_mesh("loss")
        num_ranks = 1 if mesh is None else mesh.size()
        return {"step": self.step, "ntokens_seen": self.ntokens_seen * num_ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on any number of ranks."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        num_ranks = 1 if mesh is None else mesh.size()
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"] // num_ranks

    def _adapt_beta(self) -> None:
        """Move beta after a validation in the main phase, on all ranks alike."""
        metrics = self.metrics_processor
        if self._baseline is None or metrics.validated_step != self.step:
            return
        if self.step > self.loss_fn.warmup_steps(self._schedule_steps()):
            nll = [metrics.validation_nll]
            torch.distributed.broadcast_object_list(nll, src=metrics.writer_rank)
            gap = self._baseline.at(self.step) - nll[0]
            self.loss_fn.beta = next_beta(self.loss_fn.beta, gap, self.config.loss.controller)
            logger.info(
                "beta is %.4g from step %d on: the baseline's loss minus the mixture's is %.4f",
                self.loss_fn.beta, self.step + 1, gap,
            )  # fmt: skip
        metrics.validated_step = 0

    def _start(self) -> None:
        # A step is saved before its validation, which the controller needs.
        validates_again = (
            self._baseline is not None
            and self.step > 0
            and self.validator.should_validate(self.step)
        )
        self.metrics_processor.drop_after(self.step, validates_again=validates_again)
        if validates_again:
            self.loss_fn.start_step(self.step, num_steps=self._schedule_steps())
            self.validator.validate(self.model_parts, self.step)
        before, now = self._run_state.previous_batch_size, self._run_state.batch_size
        if self.step and before != now:
            logger.warning(
                "a step now has %d sequences and had %d before: the text continues where it was, "
                "but the curve will not be that of the old run; to keep it, set [training] "
                "global_batch_size=%d",
                now, before, before,
            )  # fmt: skip
        old, new = self._run_state.previous_num_steps, self.config.training.steps
        if self.step >= new:
            logger.info(
                "nothing to do: the checkpoint is at step %d and [training] steps=%d",
                self.step, new,
            )  # fmt: skip
        elif self.step and old != new and self.config.lr_scheduler.total_steps is None:
            rates = ", ".join(f"{rate:.3g}" for rate in self.lr_schedulers.get_metrics().values())
            logger.warning(
                "[training] steps changed from %d to %d: learning rate and router warm-up follow "
                "the schedule of %d steps from step %d on (learning rate now %s); to keep the old "
                "curve, set lr_scheduler.total_steps=%d",
                old, new, new, self.step + 1, rates, old,
            )  # fmt: skip

    def batch_generator(self, data_iterable: TextDataLoader) -> Iterator[Batch]:
        """Yield batches: each on all ranks, or on none."""
        return super().batch_generator(in_step(data_iterable, self._hosts))

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run one training step.

        Raises:
            DivergenceError: If the loss or, before a save, a parameter is not finite; checked at
                logged and at saved steps.
            DataError: If the text ends before the run does, or cannot be read.
            StreamError: If a stream of text keeps failing.
            RuntimeError: If torchtitan's step fails otherwise.
        """
        self.loss_fn.start_step(self.step, num_steps=self._schedule_steps())
        position = self.dataloader.state_dict()
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if "Loss is not finite" not in str(error):
                raise
            self._record_finite()
            self._check_finite(parameters=False)
            raise
        except (DataError, StreamError):
            self.step -= 1
            self.dataloader.hold(position)
            self._save_now()
            raise
        except DataloaderExhaustedError:
            self.step -= 1
            self._save_now()
            raise DataError(
                f"the text ended after step {self.step} of {self.config.training.steps}: set "
                "[dataloader] infinite = true to start over, or lower [training] steps"
            ) from None
        self._record_finite()
        is_last = self.step == self.config.training.steps
        saves = self.checkpointer.enable and self.checkpointer._should_save(self.step, is_last)
        # The host waits for the device here anyway.
        if saves or self.metrics_processor.should_log(self.step):
            self._check_finite(parameters=saves)

    def _schedule_steps(self) -> int:
        total = self.config.lr_scheduler.total_steps
        return self.config.training.steps if total is None else total

    def _record_finite(self) -> None:
        is_bad = ~self.loss_fn.sums.isfinite().all() & (self._first_bad_step == 0)
        self._first_bad_step.add_(is_bad * self.step)

    def _check_finite(self, *, parameters: bool) -> None:
        never = torch.iinfo(torch.int64).max
        first = torch.where(self._first_bad_step == 0, never, self._first_bad_step)
        if parameters:
            local: list[Tensor] = [
                p.to_local() if isinstance(p, DTensor) else p
                for part in self.model_parts
                for p in part.parameters()
            ]
            norms = torch.stack(torch._foreach_norm([p for p in local if p.numel()]))
            is_finite = norms.isfinite().all().to(self.device)
            first = torch.where(is_finite, first, first.clamp(max=self.step))
        torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN)
        step = int(first.item())
        if step == never:
            return
        kept = "no checkpoint was kept"
        if self.checkpointer.enable:
            newest = self.checkpointer.newest()
            if newest is not None:
                kept = f"the last good checkpoint is {newest}"
        raise DivergenceError(
            f"the loss or a weight is not finite at step {step}; training stopped, {kept}; "
            "lower the learning rate ([optimizer] lr) or raise [lr_scheduler] warmup_steps"
        )
