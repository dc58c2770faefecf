"""What only a GPU can show, in a few minutes: tools/gpu_check.py --train

Every check prints its figures; the exit code is 1 if one fails. Without what a check needs it says
so and passes, so that the same command runs everywhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from nvium_titan import compat, train
from nvium_titan.bench.machine import peak_flops
from nvium_titan.errors import DependencyError
from nvium_titan.flavors import flavor_dims
from nvium_titan.flops import forward_flops
from nvium_titan.results import read_metrics

ROOT = Path(__file__).resolve().parents[1]
NUM_STEPS, BATCH, SEQ_LEN = 10, 16, 1024
# Compiled and captured by then, and between two that are logged, where the host does wait.
LOG_EVERY = 5
QUIET_STEPS = range(LOG_EVERY + 1, NUM_STEPS)


def why_not() -> str | None:
    """Return what this machine lacks, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU here"
    try:
        compat.require_torchtitan()
    except DependencyError as error:
        return str(error)
    return None


def check_train() -> bool:
    """Train 10 steps of 768x24 in bfloat16, layers compiled, steps replayed from a CUDA graph.

    Fails if training does, or if our code makes the host wait for the device within a step.
    """
    from nvium_titan.trainer import NviumTrainer

    waits: Counter[str] = Counter()
    run_step = NviumTrainer.train_step

    def watched_step(self, batches):
        if self.step not in QUIET_STEPS:
            return run_step(self, batches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run_step(self, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.update(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))

    NviumTrainer.train_step = watched_step
    with tempfile.TemporaryDirectory() as folder:
        code = train.main([
            "--config-file", str(ROOT / "train_configs" / "quadrivium-768x24.toml"),
            "--dump_folder", folder, "--hf_assets_path", "byte",
            "--training.steps", str(NUM_STEPS), "--training.local_batch_size", str(BATCH),
            "--training.global_batch_size", str(BATCH), "--metrics.log_freq", str(LOG_EVERY),
            "--dataloader.dataset", "", "--dataloader.corpus", "python_docs",
            "--validator.no_enable", "--checkpoint.no_enable",
        ])  # fmt: skip
        if code:
            print(f"train: FAILED with exit code {code}")
            return False
        last = read_metrics(Path(folder) / "metrics.jsonl")[-1]
    flops = 3 * sum(forward_flops(flavor_dims("quadrivium-768x24"), seq_len=SEQ_LEN).values())
    peak = peak_flops(torch.cuda.get_device_name(), dtype="bfloat16")
    mfu = "unknown peak" if peak is None else f"{flops * last.tokens_per_s / peak:.1%}"
    print(
        f"train: {torch.cuda.get_device_name()}, step {last.step}, loss {last.loss:.3f}, "
        f"{last.tokens_per_s:,.0f} tokens/s, MFU {mfu}, "
        f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    )
    for place, count in waits.most_common():
        print(f"train: the host waited {count} times in {len(QUIET_STEPS)} steps at {place}")
    ours = [place for place in waits if "nvium_titan" in Path(place.split(":")[0]).parts]
    if ours:
        print("train: FAILED: our code makes the host wait for the device")
    return not ours


# A check for another part of the project is one more entry.
CHECKS: dict[str, Callable[[], bool]] = {"train": check_train}


def main() -> int:
    """Run the checks asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, check in CHECKS.items():
        parser.add_argument(f"--{name}", action="store_true", help=check.__doc__.splitlines()[0])
    asked = [name for name, is_asked in vars(parser.parse_args()).items() if is_asked]
    if not asked:
        parser.error(f"give a check: {', '.join(f'--{name}' for name in CHECKS)}")
    reason = why_not()
    if reason is not None:
        print(f"gpu_check: nothing checked: {reason}")
        return 0
    failed = [name for name in asked if not CHECKS[name]()]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
