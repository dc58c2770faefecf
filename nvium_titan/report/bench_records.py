"""What a benchmark found: typed records, to and from JSON. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from nvium_titan.errors import DataError

REPORT_FILE = "bench.json"
MAX_BUSY_CORES = 0.5
OURS = ("N-vium", "dense", "twin", "trained dense")
"""Systems that are our own engine."""
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quartiles:
    """A median and the quartiles around it."""

    median: float
    """Half of the values are below."""
    q1: float
    """A quarter is below."""
    q3: float
    """Three quarters are below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times faster per token N-vium is than another system, from interleaved pairs."""

    over: str
    """Name of the other system."""
    ratio: float
    """Median over the pairs of its time per further token over N-vium's."""
    ratio_iqr: float
    """Interquartile range of the same."""
    spread: float
    """ratio_iqr / ratio."""
    conclusive: bool
    """Whether the spread is small enough; if not, this run shows nothing and must be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemFigures:
    """Times of one system, over all pairs."""

    name: str
    """One of `OURS` ("twin" is the parameter-matched dense), or a peer."""
    dtype: str
    """Type of its weights."""
    version: str
    """Of the package that computes."""
    threads: int
    """CPU threads it computes with."""
    ms_per_token: Quartiles
    """Per token after the first."""
    ttft_ms: float
    """Median time to the first token: the prompt and one choice."""
    total_ms: float
    """Median time of a whole generation."""
    tokens_per_s: float
    """Tokens after the first per second, at the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypeFigures:
    """Everything measured in one interleaved loop: N-vium in one type, and what it ran beside."""

    dtype: str
    """Type N-vium and dense computed in."""
    num_pairs: int
    """Rounds in which every system ran once."""
    systems: list[SystemFigures]
    """N-vium first, then dense, then the others."""
    ratio: float
    """Of N-vium over dense; see `Ratio`."""
    ratio_iqr: float
    """Its interquartile range."""
    spread: float
    """ratio_iqr / ratio."""
    conclusive: bool
    """Whether it may be quoted."""
    other_ratios: list[Ratio]
    """Of N-vium over every other system."""
    limit: float | None
    """Speed-up over dense that the weights read allow, at the exit shares of these runs; None for
    a batch, whose sequences share what they read."""
    fraction_of_limit: float | None
    """ratio / limit."""
    exit_shares: list[float]
    """Share of the tokens after the first that left at each exit."""
    layers_per_token: float
    """Layer calls per token after the first; of a batch each for any number of sequences."""
    host_reads_per_token: float
    """Values read from the device per token."""
    group_size_histogram: dict[str, int]
    """Block calls of a sequence by its number of rows in them, over all pairs."""
    weight_mb_per_token: dict[str, float]
    """Megabytes of weights that a token must read, of N-vium and dense; empty for a batch."""
    bandwidth_gb_s: dict[str, float]
    """The same over the measured time: achieved bandwidth, GB/s."""
    overhead: dict[str, dict[str, float]]
    """Milliseconds per further token by part, of N-vium and dense, from one run with timers;
    empty for a batch and on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The machine."""

    name: str
    """Model name."""
    num_cores: int
    """Logical cores."""
    flags: list[str]
    """Instruction sets that matter here and that it has."""
    busy_cores: float
    """Cores that other processes kept busy just before the first measurement."""

    @property
    def is_busy(self) -> bool:
        """Whether others took so much that figures show nothing."""
        return self.busy_cores > MAX_BUSY_CORES


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """One `nvium bench`."""

    model: str
    """The bundle or the shape."""
    exits: list[int]
    """Layers run at each exit."""
    num_params: int
    """Parameters of N-vium."""
    forced_shares: list[float] | None
    """Exit shares that were forced; None where the routers decided."""
    prompt_tokens: int
    """Tokens of each prompt."""
    new_tokens: int
    """Tokens made in each run by each sequence."""
    batch: int
    """Sequences decoded at once, in lock-step."""
    num_pairs_wanted: int
    """Pairs asked for; an interrupted run has fewer."""
    seed: int
    """Decides weights, prompts, exits and tokens."""
    device: str
    """Where our engine ran: the GPU's name, or cpu."""
    threads: int
    """CPU threads."""
    cpu: Cpu
    """The machine."""
    versions: dict[str, str]
    """Of nvium_titan, torch and the peers."""
    command: str
    """What was typed."""
    dtypes: list[DtypeFigures]
    """One entry per type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryFigures:
    """One category of prompts, over all trials."""

    category: str
    """Its name."""
    num_prompts: int
    """Prompts answered."""
    num_truncated: int
    """Prompts cut at the front to fit into the model's context."""
    ms_per_token: dict[str, float]
    """By system: time over tokens, prompt included; what the paper reports."""
    tokens_per_s: dict[str, float]
    """By system: tokens after the first per second, as a user sees them come."""
    ratio: float
    """Dense over N-vium of ms_per_token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsFigures:
    """Spec-Bench in one type."""

    dtype: str
    """Type computed in."""
    is_complete: bool
    """Whether every question was answered in every trial."""
    categories: list[CategoryFigures]
    """In the order of the file."""
    ratio: float
    """Mean of the categories' ratios, as the paper reports it."""
    exit_shares: list[float]
    """Of N-vium's tokens."""
    limit: float
    """Speed-up over dense that the weights read allow at these exit shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsReport:
    """One `nvium bench --prompts`."""

    model: str
    """The bundle."""
    prompts: str
    """The file."""
    num_questions: int
    """Questions of each trial."""
    num_trials: int
    """Trials."""
    max_new_tokens: int
    """Most tokens per prompt."""
    seed: int
    """Decides every token."""
    threads: int
    """CPU threads."""
    cpu: Cpu
    """The machine."""
    versions: dict[str, str]
    """Of nvium_titan and torch."""
    command: str
    """What was typed."""
    dtypes: list[PromptsFigures]
    """One entry per type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Forward and backward of one model, over all pairs."""

    name: str
    """N-vium, "dense" (the same width) or "twin" (as many parameters)."""
    num_params: int
    """Parameters."""
    tflops: float
    """10^12 floating-point operations of a step: three times the forward pass (`flops.py`)."""
    step_ms: Quartiles
    """Milliseconds of a step."""
    tokens_per_s: float
    """At the median."""
    mfu: float | None
    """Share of the device's peak that the operations reach; None where no peak is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRatio:
    """What an N-vium step costs beside another model's, from interleaved pairs."""

    over: str
    """Name of the other model."""
    time_ratio: float
    """Median over the pairs of N-vium's time over the other's."""
    time_ratio_iqr: float
    """Interquartile range of the same."""
    spread: float
    """time_ratio_iqr / time_ratio."""
    conclusive: bool
    """Whether the spread is small enough; if not, this run shows nothing and must be repeated."""
    flop_ratio: float
    """N-vium's operations over the other's."""
    cost: float
    """time_ratio / flop_ratio: 1 where a step costs what its operations say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMemory:
    """Peak of the tensors that the loss makes, beside a dense chunk with as many live logits.

    Exit states and their gradients are the model's and are left out.
    """

    live_logit_rows: int
    """Rows of logits that are alive together: exits times tokens of a chunk."""
    nvium_mb: float
    """Megabytes (10^6) at the peak of the mixture loss."""
    dense_mb: float
    """The same of the dense loss, in chunks of as many rows."""
    ratio: float
    """nvium_mb / dense_mb."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """One `nvium bench train`."""

    config_file: str
    """The configuration."""
    exits: list[int]
    """Layers run at each exit."""
    batch: int
    """Sequences of a step."""
    seq_len: int
    """Tokens of each."""
    dtype: str
    """Type of weights and activations."""
    device: str
    """Where it ran: the GPU's name, or cpu."""
    is_compiled: bool
    """Whether the layers were compiled."""
    num_pairs_wanted: int
    """Pairs asked for; an interrupted run has fewer."""
    num_pairs: int
    """Rounds in which every model made one step."""
    seed: int
    """Decides weights and tokens."""
    threads: int
    """CPU threads."""
    cpu: Cpu
    """The machine."""
    versions: dict[str, str]
    """Of nvium_titan and torch."""
    command: str
    """What was typed."""
    systems: list[StepFigures]
    """N-vium first, then dense, then the twin."""
    ratios: list[StepRatio]
    """N-vium over each other model."""
    loss_memory: LossMemory
    """Of the mixture loss."""


def to_json(report: BenchReport | PromptsReport | TrainReport) -> str:
    """Return a report as one line of JSON."""
    return json.dumps(asdict(report), ensure_ascii=False, allow_nan=False)


def read_report(path: Path) -> BenchReport:
    """Return the report that `nvium bench --out` or `--json` wrote.

    Raises:
        DataError: If the file is missing or holds no such report.
    """
    try:
        return _typed(BenchReport, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a report of nvium bench ({error!r})") from error


def _typed(kind: type[Record], data: dict[str, Any]) -> Record:
    """Return the dataclass `kind` from the JSON object that `asdict` made of it."""
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]  # Record is a dataclass here
        hint, value = hints[field.name], data[field.name]
        item = next(iter(get_args(hint)), None)
        if is_dataclass(hint):
            value = _typed(hint, value)  # type: ignore[arg-type]
        elif is_dataclass(item):
            value = [_typed(item, row) for row in value]  # type: ignore[arg-type]
        values[field.name] = value
    return kind(**values)
