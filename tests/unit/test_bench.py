"""The benchmark's parts: statistics, scripts of exits, the limit, figures, records, Spec-Bench."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nvium_titan.bench import specbench
from nvium_titan.bench.decoding import Comparison, run_comparison
from nvium_titan.bench.machine import describe_cpu
from nvium_titan.bench.models import BenchModel, check_dtypes
from nvium_titan.bench.pairs import paired_ratio, quartiles, run_pairs
from nvium_titan.bench.parts import PARTS, split_time
from nvium_titan.bench.peers import PeerChoice, parse_peer
from nvium_titan.bench.specbench import Question, SpecBench, read_questions
from nvium_titan.bench.systems import EngineRun, EngineSystem, Timing
from nvium_titan.bench.workload import Workload, exit_counts, exit_script
from nvium_titan.core.cost import count_params, limit_speedup
from nvium_titan.core.flavors import flavor_shape, parse_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode import Engine, SampledRouter, ScriptedExits
from nvium_titan.errors import BenchError, DataError
from nvium_titan.report.bench_records import BenchReport, DtypeFigures, read_report, to_json
from tests.gpu.imitation import graph_engine

SHARES = (0.35, 0.2, 0.15, 0.3)


def tiny_shape() -> ModelShape:
    return dataclasses.replace(parse_shape("64x4"), vocab_size=300)


def comparison(**changes: object) -> Comparison:
    settings = {
        "model": BenchModel.random(tiny_shape(), seed=0),
        "trained_dense": None,
        "with_twin": False,
        "peers": (),
        "forced_shares": SHARES,
        "work": Workload(prompt_tokens=5, new_tokens=21, num_pairs=3, seed=0),
        "batch": 1,
        "schedule": "lockstep",
        "kernels": "auto",
    }
    return Comparison(**(settings | changes))  # type: ignore[arg-type]


def pairs_of(num_pairs: int) -> Workload:
    return Workload(prompt_tokens=5, new_tokens=21, num_pairs=num_pairs, seed=0)


def run(settings: Comparison) -> DtypeFigures:
    return run_comparison(settings, dtype="float32", on_run=lambda: None)


class FakeSystem:
    """Takes as long as it says, and writes down who ran."""

    version, threads, dtype = "1", 1, "float32"

    def __init__(self, name: str, ms: float, log: list[str]) -> None:
        self.name, self.ms, self.log = name, ms, log

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Timing:
        self.log.append(self.name)
        seconds = self.ms * (num_new_tokens - 1) / 1000
        return Timing(num_new_tokens=num_new_tokens, ttft_s=1.0, decode_s=seconds)

    def close(self) -> None:
        """Nothing to give back."""


def test_quartiles_are_those_of_the_values() -> None:
    found = quartiles([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.q1, found.median, found.q3) == (2, 3, 4)
    assert quartiles([7.0]).q1 == quartiles([7.0]).q3 == 7


def test_ratios_are_taken_pair_by_pair() -> None:
    # The machine slows down to a third midway; each pair still says 2.
    ratio = paired_ratio("dense", [2, 2, 6, 6], [1, 1, 3, 3])
    assert (ratio.ratio, ratio.ratio_iqr, ratio.spread) == (2, 0, 0)
    assert ratio.conclusive
    ratio = paired_ratio("dense", [2, 3, 4], [1, 1, 1])
    assert ratio.ratio == 3
    assert ratio.ratio_iqr == 1
    assert ratio.spread == pytest.approx(1 / 3)
    assert not ratio.conclusive


def test_one_pair_concludes_nothing() -> None:
    assert not paired_ratio("dense", [2.0], [1.0]).conclusive


def test_systems_take_turns_in_alternating_order() -> None:
    log: list[str] = []
    systems = [FakeSystem(name, ms, log) for name, ms in (("a", 1), ("b", 2), ("c", 3))]
    runs = []
    pairs = run_pairs(
        systems, [[1]] * 3, lambda system, prompt: system.run(prompt, 11),
        on_run=lambda: runs.append(None),
    )  # fmt: skip
    assert "".join(log) == "abc" + "abccbaabc"
    assert len(runs) == 3 + 9
    assert [[t.ms_per_token for t in pair] for pair in pairs] == [pytest.approx([1, 2, 3])] * 3


@pytest.mark.parametrize("num_tokens", [1, 7, 20, 63])
@pytest.mark.parametrize("shares", [SHARES, (0, 0, 0, 1), (1, 0, 0, 0), (0.25,) * 4, (1.0,)])
def test_a_script_has_exact_counts(shares: tuple[float, ...], num_tokens: int) -> None:
    counts = exit_counts(shares, num_tokens)
    assert sum(counts) == num_tokens
    wanted = [share * num_tokens for share in shares]
    assert all(abs(count - want) < 1 for count, want in zip(counts, wanted, strict=True))
    script = exit_script(shares, num_tokens, seed=3)
    assert [script.count(index) for index in range(len(shares))] == counts
    assert script == exit_script(shares, num_tokens, seed=3)


def test_scripts_of_other_seeds_are_in_another_order() -> None:
    assert exit_counts(SHARES, 20) == [7, 4, 3, 6]
    one, other = (exit_script(SHARES, 20, seed=seed) for seed in (0, 1))
    assert one != other
    assert sorted(one) == sorted(other)


def test_forced_exits_run_and_read_the_routers_if_told_to() -> None:
    model = BenchModel.random(tiny_shape(), seed=0)
    # In pieces, so that each router read is counted.
    engine = model.load_engine(dtype="float32", max_seq_len=20, kernels="torch")
    reads = {}
    for runs_router in (False, True):
        policy = ScriptedExits(exit_indices=(2, 0), first_position=3, runs_router=runs_router)
        result = engine.generate([1, 2, 3], max_new_tokens=6, policy=policy).result()
        assert result.exit_indices == (2, 0) * 3
        reads[runs_router] = result.stats.host_reads
    # One per token, and one per router on the way: three for exit 3, one for exit 1.
    assert reads == {False: 6, True: 6 + 3 * 3 + 3 * 1}


def test_shapes_follow_the_papers_rules() -> None:
    assert parse_shape("768x24") == flavor_shape("quadrivium-768x24")
    assert parse_shape("1536x48").num_heads == flavor_shape("quadrivium-1536x48").num_heads
    shape = parse_shape("64x6", num_exits=3)
    assert (shape.num_heads, shape.ffn_dim, shape.exit_layers) == (2, 176, (2, 4))


def test_a_model_and_what_it_is_compared_with_have_the_papers_sizes() -> None:
    model = BenchModel.random(tiny_shape(), seed=0)
    assert model.shape == tiny_shape()
    assert model.num_params == sum(count_params(tiny_shape()).values())
    assert model.dense().config.is_plain_llama
    assert model.twin(seed=0).num_params == pytest.approx(model.num_params, rel=0.003)
    tensors, backbone = (m.load_tensors(torch.float32) for m in (model, model.dense()))
    assert tensors["model.norm.weight"].equal(backbone["model.norm.weight"])


def test_figures_are_those_of_the_runs() -> None:
    figures = run(comparison(with_twin=True))
    assert [system.name for system in figures.systems] == ["N-vium", "dense", "twin"]
    assert [ratio.over for ratio in figures.other_ratios] == ["twin"]
    assert figures.num_pairs == 3
    assert figures.exit_shares == [0.35, 0.2, 0.15, 0.3]
    assert figures.layers_per_token == pytest.approx(0.35 * 1 + 0.2 * 2 + 0.15 * 3 + 0.3 * 4)
    assert figures.host_reads_per_token == 1  # the native kernels read the routers themselves
    assert figures.limit == pytest.approx(limit_speedup(tiny_shape(), SHARES))
    assert figures.fraction_of_limit == pytest.approx(figures.over_dense.ratio / figures.limit)
    assert figures.weight_mb_per_token["dense"] / figures.weight_mb_per_token[
        "N-vium"
    ] == pytest.approx(figures.limit)
    for system in figures.systems[:2]:
        megabytes = figures.weight_mb_per_token[system.name]
        assert figures.bandwidth_gb_s[system.name] == megabytes / system.ms_per_token.median


def test_group_sizes_add_up_to_the_block_calls_and_the_rows() -> None:
    figures = run(comparison())
    calls, rows = 0, 0
    for size, count in figures.group_size_histogram.items():
        calls, rows = calls + count, rows + int(size) * count
    depths = [index + 1 for index in exit_script(SHARES, 20, seed=0)]
    assert calls == 3 * sum(depths)
    # Every position enters a block once, but those still owed at the end.
    assert 3 * sum(depths) < rows <= 3 * 20 * 4


def test_overhead_parts_sum_to_the_time_of_a_token() -> None:
    model = BenchModel.random(tiny_shape(), seed=0)
    engine = model.load_engine(dtype="float32", max_seq_len=30)
    policy = ScriptedExits(exit_indices=(3, 0), runs_router=True)
    ticks = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: float(next(ticks)))
        parts = split_time(engine, [1, 2, 3], 9, policy=policy, seed=0)
        patch.undo()
    assert tuple(parts) == PARTS
    assert all(ms > 0 for ms in parts.values())
    # Every look at this clock is one second; two per call, so a part counts its calls.
    blocks = 4 + 1
    assert parts["blocks"] == 1000 * blocks / 2
    assert parts["junctions"] == 1000 * ((4 + 3) + (1 + 1)) / 2
    assert parts["head"] == 1000 * 2


def test_timers_change_no_token_and_leave_the_engine_as_it_was() -> None:
    settings = comparison()
    engine = settings.model.load_engine(dtype="float32", max_seq_len=30)
    forward = engine.forward
    before = engine.generate([1, 2], max_new_tokens=9, seed=4).result().token_ids
    split_time(engine, [1, 2], 9, policy=SampledRouter(), seed=4)
    assert engine.forward is forward
    assert engine.generate([1, 2], max_new_tokens=9, seed=4).result().token_ids == before


def test_routers_decide_on_a_prompt_of_the_models_own_where_nothing_is_forced() -> None:
    figures = run(comparison(forced_shares=None))
    assert sum(figures.exit_shares) == pytest.approx(1)
    assert figures.limit == pytest.approx(limit_speedup(tiny_shape(), figures.exit_shares))


@pytest.mark.cases
@pytest.mark.parametrize("shares", [(0, 0, 0, 1), (0.5, 0, 0, 0.5), (1, 0, 0, 0)], ids=str)
def test_ext_05_a_batch_shares_its_layers_and_has_no_limit_of_one(
    shares: tuple[float, ...],
) -> None:
    figures = run(comparison(forced_shares=shares, batch=8, work=pairs_of(2)))
    assert figures.exit_shares == list(shares)
    assert (figures.limit, figures.fraction_of_limit) == (None, None)
    rounds = 4 if shares[-1] else 1
    # A block runs once for all rows that want it; at 50% some row wants the top nearly always.
    assert figures.layers_per_token == pytest.approx(rounds / 8, rel=0.1)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("shares", "layers"),
    [((0, 0, 0, 1), 4), ((0.5, 0, 0, 0.5), 2.5), ((1, 0, 0, 0), 1)],
    ids=["0%", "50%", "100%"],
)
def test_ext_05_what_early_exits_cost_and_gain_is_counted(
    shares: tuple[float, ...], layers: float
) -> None:
    """Dense runs through the same engine; reads and layers are counted, a loss is shown."""
    figures = run(comparison(forced_shares=shares))
    nvium, dense = figures.systems[:2]
    assert (nvium.dtype, nvium.version, nvium.threads) == (
        dense.dtype, dense.version, dense.threads,
    )  # fmt: skip
    assert figures.layers_per_token == layers
    assert figures.host_reads_per_token == 1
    if shares[-1] == 1:
        assert figures.limit < 1, "routers and adapters cost more than nothing"
    else:
        assert figures.limit > 1


def test_graphs_are_compared_with_dense_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def imitated(
        self: BenchModel, *, dtype: str, max_seq_len: int, kernels: str = "auto"
    ) -> Engine:
        assert kernels == "graph"
        return graph_engine(self.load_params(dtype=dtype), max_seq_len=max_seq_len)

    monkeypatch.setattr(BenchModel, "load_engine", imitated)
    figures = run(comparison(kernels="graph", work=pairs_of(2)))
    assert figures.exit_shares == list(SHARES)
    assert figures.host_reads_per_token < 1.5, "one a token, but for the first after the prompt"


def test_an_interrupt_keeps_the_pairs_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = EngineSystem.run

    def interrupted(
        self: EngineSystem, prompt_ids: Sequence[int], num_new_tokens: int
    ) -> EngineRun:
        calls.append(self.name)
        # Two warm-ups and two pairs; then in the middle of the third.
        if len(calls) == 8:
            raise KeyboardInterrupt
        return original(self, prompt_ids, num_new_tokens)

    monkeypatch.setattr(EngineSystem, "run", interrupted)
    figures = run(comparison(work=pairs_of(9)))
    assert figures.num_pairs == 2
    assert figures.overhead == {}
    assert sum(figures.exit_shares) == pytest.approx(1)


def test_an_interrupt_before_the_first_pair_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(
        self: EngineSystem, prompt_ids: Sequence[int], num_new_tokens: int
    ) -> EngineRun:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineSystem, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(comparison())


def report_of(*entries: DtypeFigures) -> BenchReport:
    return BenchReport(
        model="64x4", exits=[1, 2, 3, 4], num_params=1, forced_shares=list(SHARES),
        prompt_tokens=5, new_tokens=21, batch=1, num_pairs_wanted=3, seed=0,
        schedule="lockstep", device="cpu",
        threads=1,
        cpu=describe_cpu(), versions={"torch": "2"}, command="nvium bench", dtypes=list(entries),
    )  # fmt: skip


def test_a_report_survives_json(tmp_path: Path) -> None:
    report = report_of(run(comparison(with_twin=True)))
    path = tmp_path / "bench.json"
    path.write_text(to_json(report))
    assert read_report(path) == report
    record = json.loads(to_json(report))
    record["dtypes"][0] |= record["dtypes"][0].pop("over_dense")
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"'over_dense' is missing; run nvium bench again"):
        read_report(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}'])
def test_another_file_is_no_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"bench\.json: not a report of nvium bench"):
        read_report(path)


def test_the_chart_shows_every_system_and_the_limit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from nvium_titan.report.figures import plot_bench

    out = tmp_path / "bench.png"
    plot_bench(report_of(run(comparison(with_twin=True))), out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hff", "did you mean 'hf'"),
        ("hf:int8", r"'int8'.*valid: bfloat16, float32"),
    ],
)
def test_peers_are_checked_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_peer(text)


def test_peers_may_name_a_type() -> None:
    assert parse_peer("hf") == PeerChoice("hf", None)
    assert parse_peer("llama.cpp:q8_0") == PeerChoice("llama.cpp", "q8_0")


def test_a_peer_runs_the_dense_model_in_the_type_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    seen = {}

    def load(name: str, bundle: Path, *, dtype: str, **_: object) -> FakeSystem:
        seen[name] = dtype, json.loads((bundle / "config.json").read_text())["architectures"]
        return FakeSystem(name, 1.0, log)

    monkeypatch.setattr("nvium_titan.bench.decoding.load_peer", load)
    peers = tuple(parse_peer(text) for text in ("hf", "llama.cpp:q8_0", "onnxruntime-genai:int4"))
    figures = run(comparison(peers=peers))
    assert seen == {
        "hf": ("float32", ["LlamaForCausalLM"]),
        "llama.cpp": ("q8_0", ["LlamaForCausalLM"]),
        "onnxruntime-genai": ("int4", ["LlamaForCausalLM"]),
    }
    assert len(log) == 3 * 4
    assert [system.name for system in figures.systems[2:]] == list(seen)


def test_types_are_checked() -> None:
    assert check_dtypes("bfloat16, float32,bfloat16") == ["bfloat16", "float32"]
    with pytest.raises(BenchError, match="'bfloat61' is unknown; did you mean 'bfloat16'"):
        check_dtypes("float32,bfloat61")
    with pytest.raises(BenchError, match="at least one of"):
        check_dtypes(",")


# --- Spec-Bench ---------------------------------------------------------------------------------


def write_rows(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_questions_are_read_by_category(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "q.jsonl",
        {"category": "writing", "turns": ["a", "b"]},
        {"category": "qa", "turns": ["c"], "reference": ["d"]},
        {"category": "stem", "turns": ["e", "f"]},
        {"category": "qa", "turns": ["g"]},
    )
    names = [question.category for question in read_questions(path)]
    assert names == ["multi-turn conversation", "qa", "multi-turn conversation", "qa"]
    first = read_questions(path, per_category=1)
    assert first == [
        Question("multi-turn conversation", ("a", "b")),
        Question("qa", ("c",)),
    ]


@pytest.mark.parametrize(
    "row",
    ["not json", "[]", {"turns": ["a"]}, {"category": "qa"}, {"category": "qa", "turns": []},
     {"category": "qa", "turns": "a"}, {"category": "qa", "turns": [""]},
     {"category": 3, "turns": ["a"]}],
    ids=str,
)  # fmt: skip
def test_malformed_questions_are_named_by_line(row: object, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", {"category": "qa", "turns": ["a"]}, row)
    with pytest.raises(DataError, match=r"q\.jsonl:2: "):
        read_questions(path)


def test_missing_and_empty_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "q.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no question"):
        read_questions(tmp_path / "q.jsonl")


def test_the_published_questions_are_six_categories_of_eighty(shared_dir: Path) -> None:
    questions = read_questions(shared_dir / "data" / "specbench" / "question.jsonl")
    names = [question.category for question in questions]
    assert {name: names.count(name) for name in names} == dict.fromkeys(
        ["multi-turn conversation", "translation", "summarization", "qa", "math_reasoning", "rag"],
        80,
    )
    assert sum(len(question.turns) for question in questions) == 560


def test_every_question_is_answered_in_three_trials_by_both() -> None:
    model = BenchModel.random(dataclasses.replace(tiny_shape(), max_seq_len=40), seed=0)
    questions = [
        Question("qa", ("abc",)), Question("talk", ("a", "b")), Question("talk", ("x" * 60, "y")),
    ]  # fmt: skip
    done = []
    bench = SpecBench(
        model=model, dense=model.dense(), prompts=Path("q.jsonl"), questions=questions,
        max_new_tokens=6, seed=0, kernels="auto",
    )  # fmt: skip
    report = bench.measure(
        ["float32"], cpu=describe_cpu(), command="", on_run=lambda: done.append(None)
    )
    # Both models: once to warm up, then every question in every trial.
    assert len(done) == bench.num_runs(["float32"]) == 2 * (1 + 9)
    (figures,) = report.dtypes
    assert figures.is_complete
    assert {c.category: (c.num_prompts, c.num_truncated) for c in figures.categories} == {
        "qa": (3, 0), "talk": (12, 6),
    }  # fmt: skip
    for category in figures.categories:
        ms = category.ms_per_token
        assert category.ratio == ms["dense"] / ms["N-vium"]
    assert figures.ratio == sum(c.ratio for c in figures.categories) / 2
    assert sum(figures.exit_shares) == pytest.approx(1)
    with pytest.raises(BenchError, match="no room for a prompt in a context of 40"):
        dataclasses.replace(bench, max_new_tokens=40)


def spec_bench(*categories: str) -> SpecBench:
    model = BenchModel.random(tiny_shape(), seed=0)
    return SpecBench(
        model=model, dense=model.dense(), prompts=Path("q.jsonl"),
        questions=[Question(name, ("x",)) for name in categories], max_new_tokens=3, seed=7,
        kernels="auto",
    )  # fmt: skip


@pytest.mark.parametrize("num_questions", [2, 3])
def test_each_question_is_answered_by_either_model_first(
    num_questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, int]] = []
    original = specbench._answer

    def noted(engine: Engine, tokenizer: object, question: Question, *rest: int, seed: int) -> Any:
        calls.append((question.category, engine.num_exits, seed))
        return original(engine, tokenizer, question, *rest, seed=seed)  # type: ignore[arg-type]

    monkeypatch.setattr(specbench, "_answer", noted)
    names = [f"question {index}" for index in range(num_questions)]
    spec_bench(*names).measure(["float32"], cpu=describe_cpu(), command="", on_run=lambda: None)
    pairs = list(zip(calls[2::2], calls[3::2], strict=True))
    assert all(first[::2] == second[::2] for first, second in pairs), "the same for both models"
    assert sorted(first[2] for first, _ in pairs) == list(range(7, 7 + 3 * num_questions))
    for index, name in enumerate(names):
        firsts = [first[1] for first, _ in pairs if first[0] == name]
        assert firsts == ([4, 1, 4] if index % 2 == 0 else [1, 4, 1])


def test_an_interrupted_question_counts_for_neither_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = specbench._answer

    def interrupted(*args: Any, **settings: Any) -> Any:
        calls.append(args)
        if len(calls) == 2 + 3:  # warm-up, one pair, and half of the next
            raise KeyboardInterrupt
        return original(*args, **settings)

    monkeypatch.setattr(specbench, "_answer", interrupted)
    bench = spec_bench("qa", "talk")
    report = bench.measure(["float32"], cpu=describe_cpu(), command="", on_run=lambda: None)
    (figures,) = report.dtypes
    assert not report.is_complete
    assert [(row.category, row.num_prompts) for row in figures.categories] == [("qa", 1)]
