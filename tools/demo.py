"""Train a small N-vium and its dense twin on real text, export both, decode both, compare.

    python tools/demo.py            a few minutes on two CPU cores
    python tools/demo.py --smoke    a few steps, to see that everything works

Writes to runs/demo/: both bundles, summary.json, loss.png, exits.png and the logs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli
import torch
import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from nvium_titan.convert.export import export_checkpoint
from nvium_titan.core.cost import count_params, limit_speedup
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.decode import Engine, SamplingParams
from nvium_titan.errors import NviumError
from nvium_titan.report.figures import plot_exit_shares, plot_loss_curves
from nvium_titan.report.records import MetricsRow, read_metrics
from nvium_titan.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("runs/demo")
PROMPTS = (
    "The Python ",
    "Return the ",
    "If an exception ",
    "Class ",
    "This function ",
    "The value of ",
    "A string ",
    "Raise an error ",
)
RUNS = {"N-vium": "demo.toml", "dense twin": "demo_dense.toml"}
FOLDERS = {"N-vium": OUT / "train", "dense twin": OUT / "train_dense"}

console = Console()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The demo's table; summary.json has these keys."""

    params: int
    params_dense: int
    val_ppl_mixture: float
    val_ppl_exits: list[float]
    val_ppl_dense: float
    exit_shares: list[float]
    expected_depth: float
    limit_speedup: float
    tokens_per_s_nvium: float
    tokens_per_s_dense: float
    speedup: float


def main(smoke: bool = False) -> int:
    """Run the demo.

    Args:
        smoke: Make a few steps and tokens: nothing is learnt, but every part runs.
    """
    start = time.monotonic()
    try:
        train_both(smoke=smoke)
        tokenizer = load_tokenizer("byte")
        bundles = {"N-vium": OUT / "bundle", "dense twin": OUT / "dense_bundle"}
        for name, bundle in bundles.items():
            export_checkpoint(FOLDERS[name], bundle)
        engines = {name: Engine.from_bundle(bundle) for name, bundle in bundles.items()}
        rates, sample = decode_both(engines, tokenizer, smoke=smoke)
        metrics = {name: read_metrics(folder / "metrics.jsonl") for name, folder in FOLDERS.items()}
    except NviumError as error:
        console.print(f"demo: error: {error}", style="red")
        return error.exit_code
    summary = summarize(metrics, rates)
    (OUT / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    plot_loss_curves(metrics, OUT / "loss.png")
    plot_exit_shares(metrics["N-vium"], OUT / "exits.png")
    show(summary, sample, minutes=(time.monotonic() - start) / 60)
    return 0


def train_both(*, smoke: bool) -> None:
    """Train both models side by side, each on half of the cores, with a progress bar each.

    Raises:
        NviumError: If a training run fails; the message names its log.
    """
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    flags = ["--training.steps", "4", "--validator.steps", "1"] if smoke else []
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with Progress(*columns, console=console) as progress:
            tasks = {}
            for name, toml in RUNS.items():
                command = [
                    sys.executable, "-m", "nvium_titan.train",
                    "--config-file", str(ROOT / "train_configs" / toml), *flags,
                ]  # fmt: skip
                with log_of(name).open("wb") as log:
                    processes[name] = subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment
                    )
                tasks[name] = progress.add_task(
                    f"training the {name}", total=None, state="starting"
                )
            while any(process.poll() is None for process in processes.values()):
                time.sleep(0.5)
                for name, task in tasks.items():
                    report(progress, task, FOLDERS[name])
                for name, process in processes.items():
                    if process.poll():
                        raise NviumError(f"training the {name} failed; see {log_of(name)}")
            for name, task in tasks.items():
                report(progress, task, FOLDERS[name])
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait()


def log_of(name: str) -> Path:
    """Return the file that a training run's output goes to."""
    return OUT / f"{FOLDERS[name].name}.log"


def report(progress: Progress, task: TaskID, folder: Path) -> None:
    """Update a progress bar from what the run has logged."""
    try:
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.split == "train"]
        settings = tomli.loads((folder / "config.toml").read_text())
    except (NviumError, OSError):  # not started yet, or a line half written
        return
    steps = settings["training"]["steps"]
    if rows:
        state = f"perplexity {rows[-1].perplexity:.2f}"
        progress.update(task, total=steps, completed=rows[-1].step, state=state)


def decode_both(
    engines: dict[str, Engine], tokenizer: Tokenizer, *, smoke: bool
) -> tuple[dict[str, list[float]], str]:
    """Decode the same prompts with both models in turns; return tokens/s of each, and a text."""
    torch.set_num_threads(1)  # at this width, more threads only wait for each other
    prompts = PROMPTS[:2] if smoke else PROMPTS
    length = 16 if smoke else 240
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():  # first calls are slow
        engine.generate(tokenizer.encode("warm", add_bos=True), max_new_tokens=8).result()
    for round_index in range(1 if smoke else 3):
        for index, prompt in enumerate(prompts):
            ids = tokenizer.encode(prompt, add_bos=True)
            for name, engine in engines.items():
                seed = 100 * round_index + index
                result = engine.generate(ids, max_new_tokens=length, seed=seed).result()
                rates[name].append(result.stats.tokens_per_s)
    cool = SamplingParams(temperature=0.6, filter_scope="mixture")
    ids = tokenizer.encode(prompts[0], add_bos=True)
    text = engines["N-vium"].generate(ids, max_new_tokens=2 * length, sampling=cool).result()
    return rates, prompts[0] + tokenizer.decode(text.token_ids)


def summarize(metrics: dict[str, list[MetricsRow]], rates: dict[str, list[float]]) -> Summary:
    """Return the figures; the speed-up is the median over pairs decoded one after the other."""
    last = {name: [r for r in rows if r.split == "val"][-1] for name, rows in metrics.items()}
    shape = flavor_shape("demo")
    pairs = zip(rates["N-vium"], rates["dense twin"], strict=True)
    nvium = last["N-vium"]
    return Summary(
        params=sum(count_params(shape).values()),
        params_dense=sum(count_params(flavor_shape("dense-demo")).values()),
        val_ppl_mixture=nvium.perplexity,
        val_ppl_exits=[math.exp(ce) for ce in nvium.exit_ce],
        val_ppl_dense=last["dense twin"].perplexity,
        exit_shares=nvium.exit_shares,
        expected_depth=nvium.expected_depth,
        limit_speedup=limit_speedup(shape, nvium.exit_shares),
        tokens_per_s_nvium=statistics.median(rates["N-vium"]),
        tokens_per_s_dense=statistics.median(rates["dense twin"]),
        speedup=statistics.median(a / b for a, b in pairs),
    )


def show(summary: Summary, sample: str, *, minutes: float) -> None:
    """Print the table and a sample of text."""
    table = Table(title="A small N-vium and its dense twin, on Python's own documentation")
    table.add_column("")
    table.add_column("N-vium", justify="right")
    table.add_column("dense twin", justify="right")
    table.add_row("parameters", f"{summary.params:,}", f"{summary.params_dense:,}")
    table.add_row(
        "validation perplexity, bytes",
        f"{summary.val_ppl_mixture:.3f}",
        f"{summary.val_ppl_dense:.3f}",
    )
    for k, (ppl, share) in enumerate(
        zip(summary.val_ppl_exits, summary.exit_shares, strict=True), start=1
    ):
        table.add_row(f"  exit {k} alone (takes {share:.1%} of the tokens)", f"{ppl:.3f}", "")
    table.add_row("expected depth", f"{summary.expected_depth:.3f}", "1")
    table.add_row("speed-up that reading weights allows", f"{summary.limit_speedup:.2f}", "1")
    table.add_row(
        "tokens/s", f"{summary.tokens_per_s_nvium:.0f}", f"{summary.tokens_per_s_dense:.0f}"
    )
    table.add_row("speed-up measured (median of pairs)", f"{summary.speedup:.2f}", "1")
    console.print(table)
    console.print("A sample of the mixture, at temperature 0.6:", style="bold")
    console.print(sample, markup=False, highlight=False)
    console.print(
        f"\nDone in {minutes:.1f} minutes; bundles, summary.json, loss.png and exits.png are in "
        f"{OUT}/.\nWhat this does not show: at this size the time goes into Python and kernel "
        "launches, not into reading weights, so the measured speed-up says nothing about large "
        "models.\nNext: .venv/bin/nvium generate runs/demo/bundle --prompt 'The Python ' --stats",
        highlight=False,
    )


if __name__ == "__main__":
    try:
        sys.exit(tyro.cli(main))
    except KeyboardInterrupt:
        sys.exit(130)
