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
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from nvium_titan.checkpoint import NviumCheckpointManager
from nvium_titan.config import dump_config
from nvium_titan.data.datasets import TextDataLoader
from nvium_titan.data.tokenizers import TextTokenizer
from nvium_titan.errors import ConfigError, DivergenceError
from nvium_titan.exit_plan import resolve_exit_plan
from nvium_titan.flavors import flavor_dims, router_dim_of
from nvium_titan.flops import ModelDims
from nvium_titan.loss import MixtureLoss
from nvium_titan.metrics import NviumMetricsProcessor
from nvium_titan.model import Trainable, model_spec
from nvium_titan.optimizer import AdamW, LRSchedule, OptimizerConfig
from nvium_titan.tokenizer import check_vocabulary
from nvium_titan.validator import NviumValidator


@dataclass(kw_only=True, slots=True)
class ModelTable:
    """Table `[model]`: a named size, and any of its numbers changed."""

    flavor: str = "debug"
    """Named size to start from; `nvium info --list` shows them."""
    vocab_size: int | None = None
    """Rows of embedding and head; at least the tokenizer's size."""
    dim: int | None = None
    """Width of the residual stream."""
    num_layers: int | None = None
    """Transformer layers."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads; divides num_heads."""
    head_dim: int | None = None
    """Width of a head; default dim / num_heads when either is changed."""
    ffn_dim: int | None = None
    """Width of the MLP."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    norm_eps: float | None = None
    """Epsilon of every RMSNorm."""
    max_seq_len: int | None = None
    """Longest sequence the model is declared for, tokens; at least training.seq_len."""
    tie_embeddings: bool | None = None
    """Whether the head shares the embedding's weight."""


@dataclass(kw_only=True, slots=True)
class NviumTable:
    """Table `[nvium]`: where the exits are and how wide their parts."""

    num_exits: int | None = None
    """Exits N_V, the final one included; 1 is the dense transformer."""
    exit_layers: list[int] | None = None
    """Layers run before each early exit; left out: the even split."""
    router_dim: int | None = None
    """Width of the routers' bottleneck; default 0.66 dim, rounded up to a multiple of 8."""
    adapter_dim: int | None = None
    """Width of the adapters; default dim; 0 with num_exits = 1: no adapter, the plain Llama."""
    trainable: Trainable = "all"
    """"junctions" trains only the norm, router and adapter of every early exit; the layers and the
    final exit stay as they were loaded, to the bit."""


def resolve_dims(model: ModelTable, nvium: NviumTable) -> ModelDims:
    """Return a flavor's numbers with the two tables applied.

    Args:
        model: Table `[model]`.
        nvium: Table `[nvium]`.

    Raises:
        ConfigError: If the numbers are impossible or disagree.
    """
    base = flavor_dims(model.flavor)

    def given(table: Any, key: str, otherwise: Any) -> Any:
        value = getattr(table, key)
        return otherwise if value is None else value

    dim = given(model, "dim", base.dim)
    num_layers = given(model, "num_layers", base.num_layers)
    num_heads = given(model, "num_heads", base.num_heads)
    head_dim = model.head_dim
    if head_dim is None:
        reshaped = (dim, num_heads) != (base.dim, base.num_heads)
        if reshaped and dim % num_heads:
            raise ConfigError(
                f"num_heads={num_heads} does not divide dim={dim}; fix [model], or give head_dim"
            )
        head_dim = dim // num_heads if reshaped else base.head_dim
    num_kv_heads = model.num_kv_heads
    if num_kv_heads is None:
        full = base.num_kv_heads == base.num_heads
        num_kv_heads = num_heads if full else base.num_kv_heads
    exit_layers = nvium.exit_layers
    num_exits = nvium.num_exits
    if exit_layers is None and num_exits is None and num_layers == base.num_layers:
        exit_layers = list(base.exit_layers)
    if num_exits is None:
        num_exits = len(base.exit_layers if exit_layers is None else exit_layers) + 1
    plan = resolve_exit_plan(num_layers=num_layers, num_exits=num_exits, exit_layers=exit_layers)
    default_adapter = dim if base.adapter_dim or plan.exit_layers else 0
    default_router = (
        base.router_dim if (base.router_dim and dim == base.dim) else router_dim_of(dim)
    )
    return ModelDims(
        vocab_size=given(model, "vocab_size", base.vocab_size),
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=given(model, "ffn_dim", base.ffn_dim),
        rope_theta=given(model, "rope_theta", base.rope_theta),
        norm_eps=given(model, "norm_eps", base.norm_eps),
        max_seq_len=given(model, "max_seq_len", base.max_seq_len),
        tie_embeddings=given(model, "tie_embeddings", base.tie_embeddings),
        exit_layers=plan.exit_layers,
        router_dim=given(nvium, "router_dim", default_router) if plan.exit_layers else 0,
        adapter_dim=given(nvium, "adapter_dim", default_adapter),
    )


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
            if self.nvium.trainable == "junctions":
                self._check_frozen(dims)
            if isinstance(self.lr_scheduler, LRSchedule.Config):
                self.lr_scheduler.resolve(self.training.steps)
            # The slot is torchtitan's, whose classes are untyped.
            self.model_spec = model_spec(  # type: ignore[misc]
                dims, flavor=self.model.flavor, trainable=self.nvium.trainable
            )
            Trainer.Config.__post_init__(self)

        def _check_frozen(self, dims: ModelDims) -> None:
            if not dims.exit_layers:
                raise ConfigError(
                    '[nvium] trainable="junctions": the model has no early exit; give exit_layers'
                )
            if self.parallelism.pipeline_parallel_degree > 1:
                # A stage without a junction would have nothing to train.
                raise ConfigError(
                    '[nvium] trainable="junctions" does not go with [parallelism] '
                    f"pipeline_parallel_degree={self.parallelism.pipeline_parallel_degree}"
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
        self.stop_signal: int | None = None

    def should_continue_training(self) -> bool:
        """Say whether steps are left; the first call comes right after loading a checkpoint."""
        if not self._started:
            self._started = True
            self._start()
        if not super().should_continue_training():
            return False
        if not self._agree_to_stop():
            return True
        if self.checkpointer.enable and self.step and not self.checkpointer._should_save(self.step):
            self.checkpointer.save(self.step, last_step=True)
        logger.warning("stopped by a signal after step %d", self.step)
        return False

    def request_stop(self, signal_number: int) -> None:
        """Ask all ranks to save and stop after a step; safe in a signal handler.

        Args:
            signal_number: What was caught; `stop_signal` holds it on every rank afterwards.
        """
        self.stop_signal = signal_number

    def _agree_to_stop(self) -> bool:
        # A rank that goes ahead waits for the others within the next step, so all of them see the
        # store's entry when that step is done. No device is waited for.
        store = torch.distributed.distributed_c10d._get_default_store()
        if self.stop_signal is not None:
            last = self.step + (torch.distributed.get_world_size() > 1)
            store.compare_set("nvium/stop", "", f"{last} {self.stop_signal}")
        if not store.check(["nvium/stop"]):
            return False
        last, self.stop_signal = map(int, store.get("nvium/stop").split())
        return self.step >= last

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
            RuntimeError: Whatever else torchtitan's step meets.
        """
        self.loss_fn.start_step(self.step, num_steps=self._schedule_steps())
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if "Loss is not finite" not in str(error):
                raise
            self._record_finite()
            raise self._divergence() from error
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
        bad = (self._first_bad_step != 0).to(torch.float32)
        if parameters:
            local: list[Tensor] = [
                p.to_local() if isinstance(p, DTensor) else p
                for part in self.model_parts
                for p in part.parameters()
            ]
            norms = torch.stack(torch._foreach_norm([p for p in local if p.numel()]))
            bad = torch.maximum(bad, (~norms.isfinite().all()).to(torch.float32))
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
        if bad.item():
            raise self._divergence()

    def _divergence(self) -> DivergenceError:
        step = int(self._first_bad_step.item()) or self.step
        kept = "no checkpoint was kept"
        if self.checkpointer.enable:
            found = self.checkpointer._find_load_step()
            if found > 0:
                kept = (
                    f"the last good checkpoint is {self.checkpointer._create_checkpoint_id(found)}"
                )
        return DivergenceError(
            f"the loss or a weight is not finite at step {step}; training stopped, {kept}; "
            "lower the learning rate ([optimizer]) or raise [lr_scheduler] warmup_steps"
        )
