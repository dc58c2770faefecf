"""`nvium bench`: N-vium against dense and other engines, interleaved, with the limit beside it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from nvium_titan.cli.common import progress, shown
from nvium_titan.errors import BenchError, DependencyError

if TYPE_CHECKING:
    from nvium_titan.bench.measure import Comparison
    from nvium_titan.bench.models import BenchModel
    from nvium_titan.bench.report import BenchReport, Cpu, DtypeFigures

_PAPER_EXITS = 4


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure decode speed beside dense models and other engines, in one process, taking turns.

    A trained bundle: its routers decide. A shape: random weights, exits forced to given shares,
    every router still run and read. Dense is the same width and depth with one exit, in the same
    engine and type. Close everything else first: the figures show nothing otherwise.

    nvium bench bundles/demo

    nvium bench --shape 768x24 --exit-probs .35,.2,.15,.3 --dtypes float32,bfloat16 --peer hf

    nvium bench bundles/demo --prompts question.jsonl
    """

    bundle: tyro.conf.Positional[Path | None] = None
    """A bundle from nvium export; or give --shape."""

    shape: str | None = None
    """Width x layers of a model with random weights, such as 768x24."""

    exits: int | None = None
    """Exits of the --shape, evenly spaced; default: 4."""

    exit_probs: str | None = None
    """Share of tokens to force out at each exit, such as .35,.2,.15,.3; default: for a bundle its
    routers decide, for a shape all alike."""

    dtypes: str = "float32"
    """Types to compute in, separated by commas: one comparison each."""

    threads: int | None = None
    """CPU threads; default: as torch sets them."""

    prompt_tokens: int = 32
    """Tokens of each prompt."""

    new_tokens: int = 64
    """Tokens to make in each run; the first one counts as time to first token only."""

    pairs: int = 20
    """Rounds in which every system runs once."""

    seed: int = 0
    """Decides weights, prompts, exits and tokens."""

    twin: bool = False
    """Also run the dense model with as many parameters (a wider MLP)."""

    dense: Path | None = None
    """A trained dense bundle to run as well."""

    peer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Another engine with the dense model in it: hf, ctranslate2, llama.cpp, onnxruntime-genai, or
    NAME:DTYPE; may be given several times."""

    json: bool = False
    """Print one JSON object."""

    out: Path | None = None
    """Folder for bench.json and a bar chart, bench.png (needs the extra plots)."""

    def run(self) -> None:
        """Measure and print; after Ctrl-C the pairs so far.

        Raises:
            BenchError: If there is not exactly one model, or a number is impossible.
            KeyboardInterrupt: After the figures of an interrupted run have been printed.
        """
        import torch

        from nvium_titan.bench.machine import describe_cpu
        from nvium_titan.bench.measure import run_comparison
        from nvium_titan.bench.models import check_dtypes
        from nvium_titan.bench.report import REPORT_FILE, BenchReport, to_json

        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("pairs", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise BenchError(f"--{flag} {value}: must be at least {least}")
        dtypes = check_dtypes(self.dtypes)
        if self.out is not None:
            _check_plots()
            self.out.mkdir(parents=True, exist_ok=True)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        comparison = self._comparison()
        cpu = describe_cpu()
        _warn_if_busy(cpu)
        runs_per_dtype = (self.pairs + 1) * _num_systems(comparison)
        entries: list[DtypeFigures] = []
        done = 0
        with progress("runs", total=runs_per_dtype * len(dtypes)) as report_done:

            def on_run() -> None:
                nonlocal done
                done += 1
                report_done(done)

            for dtype in dtypes:
                entries.append(run_comparison(comparison, dtype=dtype, on_run=on_run))
                if entries[-1].num_pairs < self.pairs:
                    break
        model = comparison.model
        report = BenchReport(
            model=str(self.bundle or self.shape),
            exits=list(model.config.plan.block_ends),
            num_params=model.num_params,
            forced_shares=_as_list(comparison.forced_shares),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            num_pairs_wanted=self.pairs,
            seed=self.seed,
            threads=torch.get_num_threads(),
            cpu=cpu,
            versions=_versions(entries),
            command=shlex.join(["nvium", *sys.argv[1:]]),
            dtypes=entries,
        )
        if self.json:
            print(to_json(report))
        else:
            _print_report(report)
        if self.out is not None:
            from nvium_titan.plots.bench import plot_bench

            (self.out / REPORT_FILE).write_text(to_json(report) + "\n", encoding="utf-8")
            plot_bench(report, self.out / "bench.png")
            print(f"wrote {self.out / REPORT_FILE} and bench.png beside it", file=sys.stderr)
        if entries[-1].num_pairs < self.pairs:
            raise KeyboardInterrupt

    def _comparison(self) -> Comparison:
        from nvium_titan.bench.measure import Comparison, parse_peer
        from nvium_titan.bench.models import BenchModel
        from nvium_titan.flops import limit_speedup

        model = self._model()
        num_exits = model.config.plan.num_exits
        shares = None
        if self.exit_probs is not None:
            shares = _parse_shares(self.exit_probs)
        elif self.shape is not None:
            shares = (1 / num_exits,) * num_exits
        if shares is not None:
            limit_speedup(model.dims, shares)  # checks their number and sum
        needed, most = self.prompt_tokens + self.new_tokens, model.config.max_position_embeddings
        if needed > most:
            raise BenchError(
                f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens} are "
                f"{needed}, but the model's context is {most} tokens"
            )
        return Comparison(
            model=model,
            trained_dense=BenchModel.from_bundle(self.dense) if self.dense else None,
            with_twin=self.twin,
            peers=tuple(map(parse_peer, self.peer)),
            forced_shares=shares,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            num_pairs=self.pairs,
            seed=self.seed,
        )

    def _model(self) -> BenchModel:
        from nvium_titan.bench.models import BenchModel
        from nvium_titan.flavors import shape_dims

        if (self.bundle is None) == (self.shape is None):
            raise BenchError(
                "give a bundle or a --shape, and not both: nvium bench BUNDLE, or "
                "nvium bench --shape 768x24"
            )
        if self.bundle is not None:
            if self.exits is not None:
                raise BenchError(f"--exits {self.exits}: a bundle has its own; leave it out")
            return BenchModel.from_bundle(self.bundle)
        assert self.shape is not None, "checked above"
        num_exits = _PAPER_EXITS if self.exits is None else self.exits
        return BenchModel.random(shape_dims(self.shape, num_exits=num_exits), seed=self.seed)


def _parse_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise BenchError(f"--exit-probs {text}: must be numbers, such as .35,.2,.15,.3") from error


def _as_list(shares: Sequence[float] | None) -> list[float] | None:
    return None if shares is None else list(shares)


def _check_plots() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise DependencyError("--out draws a chart: pip install 'nvium-titan[plots]'")


def _num_systems(comparison: Comparison) -> int:
    others = comparison.with_twin + (comparison.trained_dense is not None)
    return 2 + others + len(comparison.peers)


def _warn_if_busy(cpu: Cpu) -> None:
    if cpu.is_busy:
        print(
            f"nvium: warning: other processes keep {cpu.busy_cores:.1f} cores busy; figures show "
            "nothing until they are stopped",
            file=sys.stderr,
        )


def _versions(entries: Sequence[DtypeFigures]) -> dict[str, str]:
    import torch

    from nvium_titan import __version__

    ours = {"N-vium", "dense", "twin", "trained dense"}
    systems = [system for entry in entries for system in entry.systems]
    peers = {system.name: system.version for system in systems if system.name not in ours}
    return {"nvium_titan": __version__, "torch": torch.__version__, **peers}


def _print_report(report: BenchReport) -> None:
    forced = "routers decide" if report.forced_shares is None else "forced, routers run and read"
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    print(
        f"{report.model}: {report.num_params / 1e6:.1f} M parameters, exits after layers "
        f"{', '.join(map(str, report.exits))} ({forced})\n"
        f"CPU: {report.cpu.name}, {report.cpu.num_cores} cores, {threads}; "
        f"flags that matter: {' '.join(report.cpu.flags) or 'none'}\n"
        f"prompt {report.prompt_tokens} tokens, {report.new_tokens} new, seed {report.seed}; "
        f"torch {report.versions['torch']}"
    )
    for entry in report.dtypes:
        _print_entry(entry, num_pairs_wanted=report.num_pairs_wanted)
    if report.cpu.is_busy:
        print(f"\nNot alone: {report.cpu.busy_cores:.1f} cores were busy at the start.")


def _print_entry(entry: DtypeFigures, *, num_pairs_wanted: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    pairs = f"{entry.num_pairs} interleaved pairs"
    if entry.num_pairs < num_pairs_wanted:
        pairs += f" (interrupted; {num_pairs_wanted} were asked for)"
    table = Table(title=f"\n{entry.dtype}, {pairs}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("system")
    for title in ("type", "ms/token", "quartiles", "first token ms", "total ms", "tokens/s"):
        table.add_column(title, justify="right")
    table.add_column("N-vium is", justify="right")
    ratios = [None, (entry.ratio, entry.spread, entry.conclusive)]
    ratios += [(r.ratio, r.spread, r.conclusive) for r in entry.other_ratios]
    for system, ratio in zip(entry.systems, ratios, strict=True):
        ms = system.ms_per_token
        is_peer = system.name not in ("N-vium", "dense", "twin", "trained dense")
        table.add_row(
            f"{system.name} {system.version}" if is_peer else system.name,
            system.dtype,
            f"{ms.median:.3g}",
            f"{ms.q1:.3g} - {ms.q3:.3g}",
            f"{system.ttft_ms:.3g}",
            f"{system.total_ms:.4g}",
            f"{system.tokens_per_s:.3g}",
            "" if ratio is None else _speed(*ratio),
            style="bold" if system.name == "N-vium" else None,
        )
    Console(width=110).print(table)
    print(
        f"N-vium over dense {entry.ratio:.2f}x (limit {entry.limit:.2f}x, "
        f"{entry.fraction_of_limit:.0%} of it), spread {entry.spread:.1%}"
    )
    if not entry.conclusive:
        print(
            "The pairs disagree too much: this run shows nothing. Stop what else is running and "
            "repeat it."
        )
    elif entry.exit_shares[-1] == 1:
        print(f"No token left early: that costs {1 / entry.ratio - 1:.1%} over dense.")
    elif entry.ratio < 1:
        print(f"N-vium loses here: {1 / entry.ratio:.2f}x as slow as dense.")
    groups = "  ".join(f"{rows}: {count}" for rows, count in entry.group_size_histogram.items())
    weights, bandwidth = entry.weight_mb_per_token, entry.bandwidth_gb_s
    lines = {
        "exit shares": shown(entry.exit_shares),
        "layers per token": f"{entry.layers_per_token:.2f}",
        "host reads per token": f"{entry.host_reads_per_token:.2f}",
        "rows of block calls": groups,
        "weights per token": _by_system(weights, "MB"),
        "achieved bandwidth": _by_system(bandwidth, "GB/s"),
    }
    for name, parts in entry.overhead.items():
        total = sum(parts.values())
        split = ", ".join(f"{part} {ms:.3g} ({ms / total:.0%})" for part, ms in parts.items())
        lines[f"ms of {name}"] = split
    print("\n".join(f"{name:22}{text}" for name, text in lines.items()))


def _speed(ratio: float, spread: float, is_conclusive: bool) -> str:
    word = "faster" if ratio >= 1 else "(slower)"
    return f"{ratio:.2f}x {word}, +-{spread / 2:.1%}" + ("" if is_conclusive else " ?")


def _by_system(values: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.3g} {unit}" for name, value in values.items())
