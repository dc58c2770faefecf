"""Runs of one model in many layouts, and what must be equal between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tomli_w
import torch
from torch import Tensor

from nvium_titan.bundle import read_bundle
from nvium_titan.convert.export import export_checkpoint
from nvium_titan.decode import Engine
from tests.helpers.runs import rows_of


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train_layouts(
    folder: Path, layouts: Mapping[str, Mapping[str, object]], *, num_processes: int, timeout_s: int
) -> None:
    """Train every layout, one after the other, in the same gloo processes.

    Args:
        folder: A run's TOML file and its folder lie here, under the layout's name.
        layouts: Settings of each layout.
        num_processes: Ranks of each run.
        timeout_s: For all runs together.
    """
    runs = []
    for name, settings in layouts.items():
        (folder / name).mkdir()
        toml = folder / f"{name}.toml"
        toml.write_text(tomli_w.dumps(settings))
        words = ["--config-file", str(toml)]
        runs.append({"folder": str(folder / name), "port": _free_port(), "words": words})
    plan = folder / f"runs-{num_processes}-{next(iter(layouts))}.json"
    plan.write_text(json.dumps(runs))
    logs = [plan.with_suffix(f".{rank}.log").open("w+") for rank in range(num_processes)]
    ranks = []
    for rank, log in enumerate(logs):
        launch = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.layout_worker", str(plan)],
                env={**os.environ, **launch}, stdout=log, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        tails = []
        for rank, log in enumerate(logs):
            log.seek(0)
            tails.append(f"--- rank {rank}, exit code {codes[rank]}\n{log.read()[-6000:]}")
        raise AssertionError("\n".join(tails))
    for log in logs:
        log.close()


def decoder_of(checkpoint: Path, bundle: Path) -> Engine:
    """Export a checkpoint; return a decoder of the bundle in this process."""
    export_checkpoint(checkpoint, bundle)
    assert read_bundle(bundle).config.dtype == "float32"
    return Engine.from_bundle(bundle)


def decoded_logits(engine: Engine, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Decode a sequence; return logits (E, T, V) and router logits (J, T)."""
    state = engine.new_state(max_length=len(ids))
    engine.prefill(state, ids)
    model = engine.forward
    logits, routers = [], []
    for k in range(engine.runner.num_exits):
        n_TD = model.exit_norm(k, state.buffers.boundary_SD[k + 1].narrow(0, 0, len(ids)))
        logits.append(model.logits(model.exit_state(k, n_TD)).clone())
        if k < engine.runner.num_exits - 1:
            routers.append(model.router_logit(k, n_TD).clone())
    return torch.stack(logits), torch.stack(routers)


def largest_deviations(got: Path, want: Path) -> dict[str, float]:
    """Return the largest relative differences of two runs' losses and gradient norms."""
    pairs = list(zip(rows_of(got), rows_of(want), strict=True))
    return {
        "loss": max(abs(a.loss / b.loss - 1) for a, b in pairs),
        "grad_norm": max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs),
        "exit_ce": max(
            abs(x / y - 1) for a, b in pairs for x, y in zip(a.exit_ce, b.exit_ce, strict=True)
        ),
        "exit_shares": max(
            abs(x - y) for a, b in pairs for x, y in zip(a.exit_shares, b.exit_shares, strict=True)
        ),
        "expected_depth": max(abs(a.expected_depth - b.expected_depth) for a, b in pairs),
    }


class Validated(NamedTuple):
    """What the trainer's last validation saw, of every sequence S of a run."""

    ids_ST: Tensor
    logits_SETV: Tensor
    routers_SJT: Tensor


def validated(run: Path, *, layout: str) -> Validated:
    """Return what the ranks left of the last validation.

    Args:
        run: A folder that `layout_worker` trained in.
        layout: How its ranks share the work: "fsdp" have sequences each, "tp" parts of the
            vocabulary, "pp" stages, of which the last one has the head.
    """
    paths = sorted(run.glob("validated-*.pt"), key=lambda path: int(path.stem.split("-")[1]))
    ranks = [_joined(**torch.load(path)) for path in paths if layout != "pp" or path == paths[-1]]
    if layout != "tp":
        return Validated(*map(torch.cat, zip(*ranks, strict=True)))
    assert all(torch.equal(rank.routers_SJT, ranks[0].routers_SJT) for rank in ranks)
    return ranks[0]._replace(logits_SETV=torch.cat([rank.logits_SETV for rank in ranks], dim=-1))


def _joined(ids_BT: list[Tensor], logits_NCV: list[Tensor], routers_JBC: list[Tensor]) -> Validated:
    """Join a rank's chunks to batches, and the batches."""
    num_chunks = len(logits_NCV) // len(ids_BT)
    logits, routers = [], []
    for index, ids in enumerate(ids_BT):
        chunks = slice(index * num_chunks, (index + 1) * num_chunks)
        batch = torch.cat(logits_NCV[chunks], dim=1)
        logits.append(batch.view(-1, *ids.shape, batch.shape[-1]).transpose(0, 1))
        routers.append(torch.cat(routers_JBC[chunks], dim=2).transpose(0, 1))
    return Validated(torch.cat(ids_BT), torch.cat(logits), torch.cat(routers))


def rank_steps(run: Path) -> list[list[dict[str, float]]]:
    """Return what each rank noted after its steps."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("steps-*.json"))]


def rank_pieces(run: Path) -> list[dict[str, tuple[Tensor, bool]]]:
    """Return what each rank left of its parameters, in rank order."""
    paths = sorted(run.glob("rank-*.pt"), key=lambda path: int(path.stem.removeprefix("rank-")))
    return [torch.load(path) for path in paths]
