"""`nvium bench`: N-vium against dense and other engines, in turns, with the limit beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from nvium_titan.cli.common import check_at_least, command_line, counted, progress
from nvium_titan.errors import BenchError

if TYPE_CHECKING:
    from nvium_titan.bench.decoding import Comparison
    from nvium_titan.bench.models import BenchModel
    from nvium_titan.bench.specbench import SpecBench
    from nvium_titan.report.bench_records import BenchReport, PromptsReport

_PAPER_EXITS = 4
_NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure decode speed beside dense models and other engines, in one process, taking turns.

    In a trained bundle the routers decide. A shape has random weights: its exits are forced to
    given shares, and every router still runs and is read. Dense is the same width and depth with
    one exit, on the same engine in the same type. Close everything else first, or the figures show
    nothing.

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
    """Exits of a --shape, evenly spaced; default: 4."""

    exit_probs: str | None = None
    """Share of the tokens to force out at each exit, such as .35,.2,.15,.3; default: a bundle's
    routers decide, a shape has equal shares."""

    dtypes: str = "float32"
    """Types to compute in, separated by commas; each is a comparison of its own."""

    device: str = "cpu"
    """Where our engine runs: cpu or cuda."""

    kernels: Literal["auto", "torch", "native", "graph"] = "auto"
    """What computes: graph (CUDA graphs), native (compiled, for the CPU) or torch (separate
    operations); default: graph on cuda, native on the CPU."""

    threads: int | None = None
    """CPU threads; default: torch's."""

    prompt_tokens: int = 32
    """Tokens of each prompt."""

    new_tokens: int | None = None
    """Tokens to make per run and sequence, of which the first only counts as time to first token;
    default: 64, with --prompts at most 128 per prompt."""

    batch: int = 1
    """Sequences that our engine decodes at once; ms/token counts all their tokens."""

    schedule: Literal["lockstep", "periodic", "auto"] = "lockstep"
    """When a batch runs which block: lockstep (a token for every sequence in every round), periodic
    (the first block once more before each sweep down), or auto (the best, by the exit shares of the
    first tokens). The tokens are the same."""

    pairs: int = 20
    """Rounds in which every system runs once."""

    seed: int = 0
    """Decides weights, prompts, exits and tokens."""

    twin: bool = False
    """Also run a dense model with as many parameters (a wider MLP)."""

    dense: Path | None = None
    """A trained dense bundle to run as well."""

    peer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Another engine to run the dense model in: hf, ctranslate2, llama.cpp, onnxruntime-genai, or
    NAME:DTYPE; may be given several times."""

    prompts: Path | None = None
    """Instead let a bundle and dense answer Spec-Bench's question.jsonl, in three trials."""

    per_category: int | None = None
    """With --prompts: questions to take of each category, the first ones; default: all."""

    json: bool = False
    """Print one JSON object."""

    out: Path | None = None
    """Folder for bench.json and a bar chart, bench.png (needs the extra plots)."""

    def run(self) -> None:
        """Measure and print; after Ctrl-C, what there is so far.

        Raises:
            BenchError: If there is not exactly one model, or a number is impossible.
            KeyboardInterrupt: After the figures of an interrupted run have been printed.
        """
        import torch

        from nvium_titan.bench.machine import describe_cpu
        from nvium_titan.bench.models import check_dtypes
        from nvium_titan.cli.bench_tables import show, warn_if_busy
        from nvium_titan.report.figures import require_matplotlib

        self._check_flags()
        dtypes = check_dtypes(self.dtypes)
        self._check_device(dtypes)
        if self.out is not None:
            require_matplotlib()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        bench = self._comparison(dtypes) if self.prompts is None else self._spec_bench(self.prompts)
        cpu = describe_cpu()
        warn_if_busy(cpu)
        with progress("runs", total=bench.num_runs(dtypes)) as report_done:
            report = bench.measure(
                dtypes, cpu=cpu, command=command_line(), on_run=counted(report_done)
            )
        show(report, as_json=self.json)
        if self.out is not None:
            _write(report, self.out)
        if not report.is_complete:
            raise KeyboardInterrupt

    def _check_flags(self) -> None:
        check_at_least(
            self, BenchError,
            prompt_tokens=1, new_tokens=2, pairs=1, threads=1, batch=1, per_category=1,
        )  # fmt: skip
        if self.per_category is not None and self.prompts is None:
            raise BenchError("--per-category takes questions of --prompts, which is missing")
        if self.batch > 1 and self.peer:
            raise BenchError(
                f"--batch {self.batch} does not go with --peer {self.peer[0]}: other engines "
                "decode one sequence at a time"
            )
        if self.prompts is not None:
            for name in ("shape", "exit_probs", "twin", "peer"):
                if getattr(self, name):
                    raise BenchError(
                        f"--{name.replace('_', '-')} does not go with --prompts, which runs a "
                        "bundle as it is beside dense"
                    )

    def _check_device(self, dtypes: Sequence[str]) -> None:
        import torch

        if self.device == "cpu":
            if self.kernels == "graph":
                raise BenchError("--kernels graph: graphs need a GPU; add --device cuda")
            return
        if not self.device.startswith("cuda") or not torch.cuda.is_available():
            raise BenchError(f"--device {self.device}: torch sees no such GPU here; use cpu")
        if self.peer:
            raise BenchError(
                f"--peer {self.peer[0]} runs on the CPU: it does not go with --device {self.device}"
            )
        if "int8" in dtypes:
            raise BenchError("--dtypes int8: int8 weights are for the CPU; use bfloat16")

    def _comparison(self, dtypes: Sequence[str]) -> Comparison:
        from nvium_titan.bench.decoding import Comparison
        from nvium_titan.bench.peers import parse_peer
        from nvium_titan.bench.workload import Workload
        from nvium_titan.core.cost import limit_speedup

        model = self._model()
        num_exits = model.shape.num_exits
        shares = None
        if self.exit_probs is not None:
            shares = _parse_shares(self.exit_probs)
        elif self.shape is not None:
            shares = (1 / num_exits,) * num_exits
        if shares is not None:
            limit_speedup(model.shape, shares)  # checks their number and sum
        work = Workload(self.prompt_tokens, self.new_tokens or _NEW_TOKENS, self.pairs, self.seed)
        if work.max_seq_len > model.context:
            raise BenchError(
                f"--prompt-tokens {work.prompt_tokens} and --new-tokens {work.new_tokens} do not "
                f"fit into the model's context of {model.context} tokens"
            )
        peers = tuple(map(parse_peer, self.peer))
        for dtype in dtypes:
            for peer in peers:
                if peer.dtype_beside(dtype) is None:
                    print(
                        f"nvium: {peer.name} has no {dtype} and is left out beside it; to run it "
                        f"in another type: --peer {peer.name}:float32",
                        file=sys.stderr,
                    )
        return Comparison(
            model=model,
            trained_dense=self._trained_dense(),
            with_twin=self.twin,
            peers=peers,
            forced_shares=shares,
            work=work,
            batch=self.batch,
            schedule=self.schedule,
            kernels=self.kernels,
        )

    def _spec_bench(self, prompts: Path) -> SpecBench:
        from nvium_titan.bench.specbench import MAX_NEW_TOKENS, SpecBench, read_questions

        model = self._model()
        return SpecBench(
            model=model,
            dense=self._trained_dense() or model.dense(),
            prompts=prompts,
            questions=read_questions(prompts, per_category=self.per_category),
            max_new_tokens=self.new_tokens or MAX_NEW_TOKENS,
            seed=self.seed,
            kernels=self.kernels,
        )

    def _model(self) -> BenchModel:
        from nvium_titan.bench.models import BenchModel
        from nvium_titan.core.flavors import parse_shape

        if self.bundle is not None and self.shape is None:
            if self.exits is not None:
                raise BenchError(f"--exits {self.exits}: a bundle has its own; leave it out")
            return BenchModel.from_bundle(self.bundle, device=self.device)
        if self.bundle is not None or self.shape is None:
            raise BenchError(
                "give a bundle or a --shape, and not both: nvium bench BUNDLE, or "
                "nvium bench --shape 768x24"
            )
        num_exits = _PAPER_EXITS if self.exits is None else self.exits
        shape = parse_shape(self.shape, num_exits=num_exits)
        return BenchModel.random(shape, seed=self.seed, device=self.device)

    def _trained_dense(self) -> BenchModel | None:
        from nvium_titan.bench.models import BenchModel

        return BenchModel.from_bundle(self.dense, device=self.device) if self.dense else None


def _parse_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise BenchError(f"--exit-probs {text}: must be numbers, such as .35,.2,.15,.3") from error


def _write(report: BenchReport | PromptsReport, out: Path) -> None:
    """Write bench.json, and the chart where there is one."""
    from nvium_titan.report.bench_records import REPORT_FILE, BenchReport, to_json
    from nvium_titan.report.figures import plot_bench

    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT_FILE).write_text(to_json(report) + "\n", encoding="utf-8")
    if isinstance(report, BenchReport):
        plot_bench(report, out / "bench.png")
    print(f"wrote {', '.join(map(str, sorted(out.glob('bench.*'))))}", file=sys.stderr)
