"""`NviumTrainer`: only what differs from torchtitan's trainer.

The training step is torchtitan's `Trainer.train_step`: batches, forward, `MixtureLoss`, backward,
clipping, optimizer. Before it the loss gets the phase's weights; after it the figures are checked.
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

from nvium_titan.checkpoint import NviumCheckpointManager
from nvium_titan.config import dump_config
from nvium_titan.config.tables import ModelTable, NviumTable, resolve_dims
from nvium_titan.data.datasets import TextDataLoader
from nvium_titan.data.tokenizers import TextTokenizer
from nvium_titan.errors import ConfigError, DataError, DivergenceError
from nvium_titan.flops import ModelDims
from nvium_titan.loss import MixtureLoss
from nvium_titan.metrics import NviumMetricsProcessor
from nvium_titan.model import model_spec
from nvium_titan.optimizer import AdamW, LRSchedule, OptimizerConfig
from nvium_titan.tokenizer import check_vocabulary
from nvium_titan.validator import NviumValidator


class _RunState(Stateful):
    """What a checkpoint says of the run that wrote it, beyond torchtitan's own state."""

    def __init__(self, *, num_steps: int, settings: str) -> None:
        self.num_steps = num_steps
        self.settings = settings
        self.previous_num_steps = num_steps

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "settings": self.settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_num_steps = state_dict["num_steps"]


class NviumTrainer(Trainer):
    """Trains an N-vium, or with one exit the dense transformer, on torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration, the tables `[model]` and `[nvium]`, and our components."""

        model: ModelTable = field(default_factory=ModelTable)
        nvium: NviumTable = field(default_factory=NviumTable)
        loss: MixtureLoss.Config = field(default_factory=MixtureLoss.Config)
        optimizer: OptimizerConfig = field(default_factory=AdamW.Config)
        lr_scheduler: LRSchedule.Config = field(default_factory=LRSchedule.Config)
        # A run repeats unless told otherwise, and leaves no logs that nobody asked for.
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
            dims = resolve_dims(self.model, self.nvium)
            if self.training.seq_len > dims.max_seq_len:
                raise ConfigError(
                    f"[training] seq_len={self.training.seq_len}: the model is declared for "
                    f"max_seq_len={dims.max_seq_len}; raise [model] max_seq_len or lower it"
                )
            if self.nvium.trainable == "junctions" and not dims.exit_layers:
                raise ConfigError(
                    '[nvium] trainable="junctions": the model has no early exit; give exit_layers'
                )
            self._check_parallelism()
            if isinstance(self.lr_scheduler, LRSchedule.Config):
                self.lr_scheduler.resolve(self.training.steps)
            # The slot is torchtitan's, whose classes are untyped.
            self.model_spec = model_spec(  # type: ignore[misc]
                dims, flavor=self.model.flavor, trainable=self.nvium.trainable
            )
            Trainer.Config.__post_init__(self)

        def _check_parallelism(self) -> None:
            layout = self.parallelism
            if layout.pipeline_parallel_degree > 1:
                raise ConfigError(
                    f"[parallelism] pipeline_parallel_degree={layout.pipeline_parallel_degree}: "
                    "pipeline stages are not supported yet; use data_parallel_shard_degree or "
                    "tensor_parallel_degree"
                )
            if layout.spmd_backend != "spmd_types":
                raise ConfigError(
                    f'[parallelism] spmd_backend="{layout.spmd_backend}": the mixture loss needs '
                    'plain tensors; use "spmd_types"'
                )

        def resolved(self) -> NviumTrainer.Config:
            """Return the same settings with every number of the model written out."""
            dims = self.model_spec.model.dims
            numbers = {f.name: getattr(dims, f.name) for f in fields(ModelTable)[1:]}
            return replace(
                self,
                model=ModelTable(flavor=self.model.flavor, **numbers),
                nvium=NviumTable(
                    num_exits=dims.plan.num_exits,
                    exit_layers=list(dims.exit_layers),
                    router_dim=dims.router_dim,
                    adapter_dim=dims.adapter_dim,
                    trainable=self.nvium.trainable,
                ),
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        dims: ModelDims = config.model_spec.model.dims
        check_vocabulary(self.tokenizer, dims.vocab_size)
        has_head = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        self.loss_fn.bind(
            self.model_parts[-1].lm_head if has_head else None,
            dims.plan,
            vocab_size=dims.vocab_size,
            device=self.device,
        )
        self.metrics_processor.loss_fn = self.loss_fn
        self.metrics_processor.dims = dims
        self._run_state = _RunState(
            num_steps=config.training.steps, settings=dump_config(config.resolved())
        )
        if self.checkpointer.enable:
            self.checkpointer.states["nvium"] = self._run_state
        self._first_bad_step = torch.zeros((), dtype=torch.int64, device=self.device)
        self._started = False
        self._asked_to_stop: int | None = None
        self.stopped_by: int | None = None

    def should_continue_training(self) -> bool:
        """Say whether steps are left; the first call comes right after loading a checkpoint."""
        if not self._started:
            self._started = True
            self._start()
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
        """Ask all ranks to save and stop after a step or two; safe in a signal handler.

        Args:
            signal_number: What was caught; `stopped_by` holds it on every rank once all stopped.
        """
        self._asked_to_stop = signal_number

    def _agreed_stop(self) -> int | None:
        """Return the signal to stop for, once the step is reached that all ranks agree on.

        No device is waited for. The host may launch one step before the last one's collectives are
        done, so a rank is at most two steps ahead of the entry that another one writes.
        """
        store = torch.distributed.distributed_c10d._get_default_store()
        if self._asked_to_stop is not None:
            last = self.step + (2 if torch.distributed.get_world_size() > 1 else 0)
            store.compare_set("nvium/stop", "", f"{last} {self._asked_to_stop}")
        if not store.check(["nvium/stop"]):
            return None
        last, signal_number = map(int, store.get("nvium/stop").split())
        return signal_number if self.step >= last else None

    def _save_now(self) -> None:
        """Save all that a run needs to go on, unless the interval has saved this step already."""
        manager = self.checkpointer
        if not manager.enable or not self.step or manager._should_save(self.step):
            return
        self._check_finite(parameters=True)
        # The last step of a whole run may be saved as weights alone; this is not it.
        manager.last_save_model_only = manager.last_save_in_hf = False
        manager.save(self.step, last_step=True)

    def _start(self) -> None:
        self.metrics_processor.drop_after(self.step)
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
                "curve set lr_scheduler.total_steps=%d",
                old, new, new, self.step + 1, rates, old,
            )  # fmt: skip

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Run one training step in its phase of the objective.

        Raises:
            DivergenceError: If the loss or, before a save, a parameter is not finite. It is read
                only where the host waits anyway: at logged and at saved steps.
            DataError: If the text ends before the run does.
            RuntimeError: Whatever else torchtitan's step meets.
        """
        self.loss_fn.start_step(self.step, num_steps=self._schedule_steps())
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if "Loss is not finite" not in str(error):
                raise
            self._record_finite()
            self._check_finite(parameters=False)
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
            found = self.checkpointer._find_load_step()
            if found > 0:
                path = self.checkpointer._create_checkpoint_id(found)
                kept = f"the last good checkpoint is {path}"
        raise DivergenceError(
            f"the loss or a weight is not finite at step {step}; training stopped, {kept}; "
            "lower the learning rate ([optimizer]) or raise [lr_scheduler] warmup_steps"
        )
