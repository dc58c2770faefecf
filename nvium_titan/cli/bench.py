"""`nvium bench`: N-vium against dense and other engines, interleaved, with the limit beside it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from nvium_titan.cli.common import command_line, progress
from nvium_titan.errors import BenchError, DependencyError

if TYPE_CHECKING:
    import torch

    from nvium_titan.bench.measure import Comparison
    from nvium_titan.bench.models import BenchModel
    from nvium_titan.report.bench_records import (
        BenchReport,
        Cpu,
        DtypeFigures,
        PromptsFigures,
        PromptsReport,
    )

    _Measure = Callable[[Sequence[str], Cpu], tuple[BenchReport | PromptsReport, bool]]

_PAPER_EXITS = 4
_NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure decode speed beside dense models and other engines, in one process, taking turns.

    A trained bundle: its routers decide. A shape: random weights, exits forced to given shares,
    every router still run and read. Dense is the same width and depth with one exit, in the same
    engine and type. Close everything else first: the figures show nothing otherwise.

    nvium bench bundles/demo

    nvium bench --shape 768x24 --exit-probs .35,.2,.15,.3 --dtypes float32,bfloat16 --peer hf

    nvium bench bundles/demo --prompts question.jsonl

    The cost of training: nvium bench train --help
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

    device: str = "cpu"
    """Where our engine computes: cpu or cuda."""

    kernels: Literal["auto", "torch", "native", "graph"] = "auto"
    """What computes: graph (CUDA graphs; imitated on the CPU, slowly), native (compiled, for the
    CPU), torch (separate operations); default: graph on cuda, native on the CPU."""

    threads: int | None = None
    """CPU threads; default: as torch sets them."""

    prompt_tokens: int = 32
    """Tokens of each prompt."""

    new_tokens: int | None = None
    """Tokens to make in each run, the first of which counts as time to first token only; default:
    64, and at most 128 per prompt of --prompts."""

    batch: int = 1
    """Sequences decoded at once by our engine, in lock-step; ms/token is over the tokens of all."""

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

    prompts: Path | None = None
    """Answer the prompts of Spec-Bench's question.jsonl instead, in three trials; for a bundle."""

    per_category: int | None = None
    """With --prompts: take the first N questions of each category; default: all."""

    json: bool = False
    """Print one JSON object."""

    out: Path | None = None
    """Folder for bench.json and a bar chart, bench.png (needs the extra plots)."""

    def run(self) -> None:
        """Measure and print; after Ctrl-C what there is so far.

        Raises:
            BenchError: If there is not exactly one model, or a number is impossible.
            KeyboardInterrupt: After the figures of an interrupted run have been printed.
        """
        import torch

        from nvium_titan.bench.machine import describe_cpu
        from nvium_titan.bench.models import check_dtypes
        from nvium_titan.cli.bench_tables import (
            print_prompts,
            print_report,
            warn_if_busy,
            warn_if_inconclusive,
        )
        from nvium_titan.report.bench_records import REPORT_FILE, BenchReport, to_json

        self._check_numbers()
        dtypes = check_dtypes(self.dtypes)
        self._check_device(dtypes)
        if self.out is not None:
            _check_plots()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        measure = self._prepare_prompts() if self.prompts else self._prepare_pairs()
        cpu = describe_cpu()
        warn_if_busy(cpu)
        report, is_complete = measure(dtypes, cpu)
        if self.json:
            print(to_json(report))
            warn_if_inconclusive(report)
        elif isinstance(report, BenchReport):
            print_report(report)
        else:
            print_prompts(report)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / REPORT_FILE).write_text(to_json(report) + "\n", encoding="utf-8")
            if isinstance(report, BenchReport):
                from nvium_titan.report.bench_figures import plot_bench

                plot_bench(report, self.out / "bench.png")
            print(f"wrote {', '.join(map(str, sorted(self.out.glob('bench.*'))))}", file=sys.stderr)
        if not is_complete:
            raise KeyboardInterrupt

    def _check_numbers(self) -> None:
        for name, least in (
            ("prompt_tokens", 1), ("new_tokens", 2), ("pairs", 1), ("threads", 1),
            ("batch", 1),
            ("per_category", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise BenchError(f"--{flag} {value}: must be at least {least}")
        if self.per_category is not None and self.prompts is None:
            raise BenchError("--per-category takes questions of --prompts, which is missing")
        if self.batch > 1 and self.peer:
            raise BenchError(
                f"--batch {self.batch} does not go with --peer {self.peer[0]}: other engines are "
                "measured one sequence at a time"
            )
        if self.prompts is not None:
            unused = [
                name for name in ("shape", "exit_probs", "twin", "peer") if getattr(self, name)
            ]
            if unused:
                raise BenchError(
                    f"--{unused[0].replace('_', '-')} does not go with --prompts, which runs a "
                    "bundle as it is beside dense"
                )

    def _check_device(self, dtypes: Sequence[str]) -> None:
        import torch

        if self.device == "cpu":
            return
        if not self.device.startswith("cuda") or not torch.cuda.is_available():
            raise BenchError(f"--device {self.device}: torch sees no such GPU here; use cpu")
        if self.peer:
            raise BenchError(f"--peer {self.peer[0]} runs on the CPU, so not with --device cuda")
        if "int8" in dtypes:
            raise BenchError("--dtypes int8: int8 weights are for the CPU; use bfloat16")

    def _prepare_pairs(self) -> _Measure:
        from nvium_titan.bench.measure import run_comparison
        from nvium_titan.report.bench_records import BenchReport

        comparison = self._comparison()

        def measure(dtypes: Sequence[str], cpu: Cpu) -> tuple[BenchReport, bool]:
            entries: list[DtypeFigures] = []
            total = sum(map(comparison.num_runs, dtypes))
            with progress("runs", total=total) as report_done:
                on_run = _counting(report_done)
                for dtype in dtypes:
                    _say_left_out(comparison, dtype)
                    entries.append(run_comparison(comparison, dtype=dtype, on_run=on_run))
                    if entries[-1].num_pairs < self.pairs:
                        break
            model = comparison.model
            report = BenchReport(
                model=str(self.bundle or self.shape),
                exits=list(model.config.shape.block_ends),
                num_params=model.num_params,
                forced_shares=_as_list(comparison.forced_shares),
                prompt_tokens=comparison.prompt_tokens,
                new_tokens=comparison.new_tokens,
                batch=comparison.batch,
                num_pairs_wanted=self.pairs,
                seed=self.seed,
                device=_device_name(model.device),
                threads=_num_threads(),
                cpu=cpu,
                versions=_versions(entries),
                command=command_line(),
                dtypes=entries,
            )
            return report, entries[-1].num_pairs == self.pairs

        return measure

    def _prepare_prompts(self) -> _Measure:
        from nvium_titan.bench.specbench import (
            MAX_NEW_TOKENS,
            NUM_TRIALS,
            Answerer,
            read_questions,
            run_questions,
        )
        from nvium_titan.report.bench_records import PromptsReport

        assert self.prompts is not None, "the caller has seen it"
        model = self._model()
        dense = self._trained_dense() or model.dense()
        questions = read_questions(self.prompts, per_category=self.per_category)
        max_new_tokens = self.new_tokens or MAX_NEW_TOKENS

        def measure(dtypes: Sequence[str], cpu: Cpu) -> tuple[PromptsReport, bool]:
            entries: list[PromptsFigures] = []
            with progress("questions", total=NUM_TRIALS * len(questions) * len(dtypes)) as report:
                on_question = _counting(report)
                for dtype in dtypes:
                    nvium, beside = (
                        Answerer(
                            name,
                            m.load_engine(dtype=dtype, max_seq_len=m.context, kernels=self.kernels),
                        )
                        for name, m in (("N-vium", model), ("dense", dense))
                    )
                    entries.append(
                        run_questions(
                            nvium, beside, model.tokenizer, questions,
                            shape=model.shape, dtype=dtype, max_new_tokens=max_new_tokens,
                            seed=self.seed, on_question=on_question,
                        )
                    )  # fmt: skip
                    if not entries[-1].is_complete:
                        break
            prompts_report = PromptsReport(
                model=str(self.bundle),
                prompts=str(self.prompts),
                num_questions=len(questions),
                num_trials=NUM_TRIALS,
                max_new_tokens=max_new_tokens,
                seed=self.seed,
                threads=_num_threads(),
                cpu=cpu,
                versions=_versions([]),
                command=command_line(),
                dtypes=entries,
            )
            return prompts_report, entries[-1].is_complete

        return measure

    def _comparison(self) -> Comparison:
        from nvium_titan.bench.measure import Comparison, parse_peer
        from nvium_titan.core.cost import limit_speedup

        model = self._model()
        num_exits = model.config.shape.num_exits
        shares = None
        if self.exit_probs is not None:
            shares = _parse_shares(self.exit_probs)
        elif self.shape is not None:
            shares = (1 / num_exits,) * num_exits
        if shares is not None:
            limit_speedup(model.shape, shares)  # checks their number and sum
        new_tokens = _NEW_TOKENS if self.new_tokens is None else self.new_tokens
        if self.prompt_tokens + new_tokens > model.context:
            raise BenchError(
                f"--prompt-tokens {self.prompt_tokens} and --new-tokens {new_tokens} do not fit "
                f"into the model's context of {model.context} tokens"
            )
        return Comparison(
            model=model,
            trained_dense=self._trained_dense(),
            with_twin=self.twin,
            peers=tuple(map(parse_peer, self.peer)),
            forced_shares=shares,
            prompt_tokens=self.prompt_tokens,
            new_tokens=new_tokens,
            batch=self.batch,
            num_pairs=self.pairs,
            seed=self.seed,
            kernels=self.kernels,
        )

    def _trained_dense(self) -> BenchModel | None:
        from nvium_titan.bench.models import BenchModel

        return BenchModel.from_bundle(self.dense, device=self.device) if self.dense else None

    def _model(self) -> BenchModel:
        from nvium_titan.bench.models import BenchModel
        from nvium_titan.core.flavors import parse_shape

        if (self.bundle is None) == (self.shape is None):
            raise BenchError(
                "give a bundle or a --shape, and not both: nvium bench BUNDLE, or "
                "nvium bench --shape 768x24"
            )
        if self.bundle is not None:
            if self.exits is not None:
                raise BenchError(f"--exits {self.exits}: a bundle has its own; leave it out")
            return BenchModel.from_bundle(self.bundle, device=self.device)
        assert self.shape is not None, "checked above"
        num_exits = _PAPER_EXITS if self.exits is None else self.exits
        shape = parse_shape(self.shape, num_exits=num_exits)
        return BenchModel.random(shape, seed=self.seed, device=self.device)


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


def _say_left_out(comparison: Comparison, dtype: str) -> None:
    running = {name for name, _ in comparison.peers_for(dtype)}
    for peer in comparison.peers:
        if peer.name not in running:
            print(
                f"nvium: {peer.name} has no {dtype} and is left out there; to run it in another "
                f"type: --peer {peer.name}:float32",
                file=sys.stderr,
            )


def _counting(report_done: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that reports one more each time."""
    done = itertools.count(1)
    return lambda: report_done(next(done))


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _versions(entries: Sequence[DtypeFigures]) -> dict[str, str]:
    import torch

    from nvium_titan import __version__
    from nvium_titan.report.bench_records import OURS

    systems = [system for entry in entries for system in entry.systems]
    peers = {system.name: system.version for system in systems if system.name not in OURS}
    return {"nvium_titan": __version__, "torch": torch.__version__, **peers}
