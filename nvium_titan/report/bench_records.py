"""What a benchmark found: typed records, to and from JSON. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from nvium_titan.errors import DataError
from nvium_titan.report.records import from_json

REPORT_FILE = "bench.json"
MAX_BUSY_CORES = 0.5
OURS = ("N-vium", "dense", "twin", "trained dense")
"""Systems that are our own engine."""


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
    """N-vium compared with another system, from interleaved pairs.

    Decoding: the other's time per further token over N-vium's, so how many times faster N-vium is.
    Training: N-vium's time per step over the other's, so what N-vium costs.
    """

    over: str
    """Name of the other system."""
    ratio: float
    """Median over the pairs."""
    ratio_iqr: float
    """Interquartile range over the pairs."""
    spread: float
    """ratio_iqr / ratio."""
    conclusive: bool
    """Whether the spread is small enough; if not, the run shows nothing and must be repeated."""


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
    """N-vium in one type, and the systems it took turns with."""

    dtype: str
    """Type N-vium and dense computed in."""
    num_pairs: int
    """Pairs run."""
    systems: list[SystemFigures]
    """N-vium first, then dense, then the others."""
    over_dense: Ratio
    """N-vium over dense."""
    other_ratios: list[Ratio]
    """N-vium over each of the others."""
    limit: float | None
    """Highest speed-up over dense that reading weights allows at these exit shares; None for a
    batch, whose sequences share what they read."""
    fraction_of_limit: float | None
    """over_dense.ratio / limit."""
    exit_shares: list[float]
    """Share of the tokens after the first that left at each exit."""
    layers_per_token: float
    """Layer calls per token after the first; a call serves any number of sequences of a batch."""
    host_reads_per_token: float
    """Values read from the device per token."""
    group_size_histogram: dict[str, int]
    """Block calls by the number of rows that a sequence had in them, over all pairs."""
    weight_mb_per_token: dict[str, float]
    """Megabytes of weights that a token of N-vium and of dense must read; empty for a batch."""
    bandwidth_gb_s: dict[str, float]
    """The same over the measured time: the bandwidth achieved, GB/s."""
    overhead: dict[str, dict[str, float]]
    """Milliseconds per token after the first, by part, of one run of N-vium and of dense with
    timers; empty for a batch and on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The machine."""

    name: str
    """Model name."""
    num_cores: int
    """Logical cores."""
    flags: list[str]
    """The instruction sets it has, of those that matter here."""
    busy_cores: float
    """Cores that other processes kept busy just before the first measurement."""

    @property
    def is_busy(self) -> bool:
        """Whether other processes took so much that figures show nothing."""
        return self.busy_cores > MAX_BUSY_CORES


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What every report says of its run."""

    seed: int
    """Decides weights, prompts, exits and tokens."""
    threads: int
    """CPU threads."""
    cpu: Cpu
    """The machine."""
    versions: dict[str, str]
    """Of nvium_titan, torch and the peers."""
    command: str
    """What was typed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport(Report):
    """One `nvium bench`."""

    model: str
    """The bundle or the shape."""
    exits: list[int]
    """Layers run at each exit."""
    num_params: int
    """Parameters of N-vium."""
    forced_shares: list[float] | None
    """Exit shares that were forced; None if the routers decided."""
    prompt_tokens: int
    """Tokens of each prompt."""
    new_tokens: int
    """Tokens made in each run by each sequence."""
    batch: int
    """Sequences decoded at once."""
    schedule: str
    """When a batch ran which block."""
    num_pairs_wanted: int
    """Pairs asked for; an interrupted run has fewer."""
    device: str
    """Where our engine ran: the GPU's name, or cpu."""
    dtypes: list[DtypeFigures]
    """One entry per type."""

    @property
    def is_complete(self) -> bool:
        """Whether no interrupt cut it short."""
        return self.dtypes[-1].num_pairs == self.num_pairs_wanted


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
    """By system: all time, the prompt's included, over all tokens, as the paper reports it."""
    tokens_per_s: dict[str, float]
    """By system: tokens after the first per second, as a user sees them arrive."""
    ratio: float
    """Dense's ms_per_token over N-vium's."""


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
    """Highest speed-up over dense that reading weights allows at these exit shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsReport(Report):
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
    dtypes: list[PromptsFigures]
    """One entry per type."""

    @property
    def is_complete(self) -> bool:
        """Whether no interrupt cut it short."""
        return self.dtypes[-1].is_complete


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Forward and backward of one model, over all pairs."""

    name: str
    """N-vium, "dense" (the same width) or "twin" (as many parameters)."""
    num_params: int
    """Parameters."""
    tflops: float
    """10^12 floating-point operations of a step: three times `forward_flops`."""
    step_ms: Quartiles
    """Milliseconds of a step."""
    tokens_per_s: float
    """At the median."""
    mfu: float | None
    """Share of the device's peak that the operations reach; None if its peak is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRatio:
    """What an N-vium step costs beside another model's."""

    time: Ratio
    """N-vium's time over the other's."""
    flop_ratio: float
    """N-vium's operations over the other's."""
    cost: float
    """time.ratio / flop_ratio: 1 where a step costs what its operations say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMemory:
    """Peak memory of the mixture loss, and of a dense loss with as many live logits.

    Exit states and their gradients are left out: they are the model's.
    """

    live_logit_rows: int
    """Rows of logits alive at once: exits times tokens of a chunk."""
    nvium_mb: float
    """Peak of the mixture loss, 10^6 bytes."""
    dense_mb: float
    """Peak of the dense loss, in chunks of as many rows."""
    ratio: float
    """nvium_mb / dense_mb."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport(Report):
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
    """Pairs run."""
    systems: list[StepFigures]
    """N-vium first, then dense, then the twin."""
    ratios: list[StepRatio]
    """N-vium over each of the others."""
    loss_memory: LossMemory
    """Of the mixture loss."""

    @property
    def is_complete(self) -> bool:
        """Whether no interrupt cut it short."""
        return self.num_pairs == self.num_pairs_wanted


def to_json(report: Report) -> str:
    """Return a report as one line of JSON."""
    return json.dumps(asdict(report), ensure_ascii=False, allow_nan=False)


def read_report(path: Path) -> BenchReport:
    """Return the report that `nvium bench --out` or `--json` wrote.

    Raises:
        DataError: If the file is missing or holds no such report, or one of another layout.
    """
    try:
        return from_json(BenchReport, json.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        raise DataError(
            f"{path}: not a report of nvium bench in this version's layout: {error} is missing; "
            "run nvium bench again"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a report of nvium bench ({error!r})") from error
