"""One rank of several runs in a row: `python -m tests.helpers.layout_worker RUNS.json`.

Importing the trainer takes longer than a tiny run: a rank imports it once and forks for each run.
Beside each run's own files it leaves `rank-N.pt`: the local piece of every parameter, and whether
tensor parallelism keeps a whole copy of it on each rank; `steps-N.json`: after each step the bytes
of all live tensors and the loss's weights; and `validated-N.pt`: the token ids of the last
validation, and the logits and router logits that its loss was made of.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nvium_titan.train.compat import use_cpu_without_accelerator

Steps = list[dict[str, float]]


def local_pieces(parts: list[torch.nn.Module]) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return this rank's piece of every parameter, and whether TP ranks hold the same one."""
    pieces = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            assert name not in pieces, f"{name} lies on two stages of this rank"
            if isinstance(parameter, DTensor):
                names = parameter.device_mesh.mesh_dim_names or ()
                placement = dict(zip(names, parameter.placements, strict=True)).get("tp")
                same = placement is None or placement.is_replicate()
                pieces[name] = (parameter.to_local().detach().clone(), same)
            else:
                pieces[name] = (parameter.detach().clone(), True)
    return pieces


def live_bytes() -> int:
    """Return the bytes of all storages that a tensor of this process holds."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def keep_validated() -> dict[str, list[torch.Tensor]]:
    """Return what validations see from now on: token ids a batch, the rest a chunk of the loss."""
    from nvium_titan.train.loss import MixtureLoss
    from nvium_titan.train.validator import NviumValidator

    kept: dict[str, list[torch.Tensor]] = {"ids_BT": [], "logits_NCV": [], "routers_JBC": []}
    validate, chunk_loss = NviumValidator.validate, MixtureLoss._chunk_loss
    process = NviumValidator.post_dataloading_process

    def validate_anew(self: Any, *args: Any) -> None:
        for values in kept.values():
            values.clear()
        validate(self, *args)

    def process_and_keep(self: Any, *args: Any) -> Any:
        found = process(self, *args)
        kept["ids_BT"].append(found[0])
        return found

    def chunk_loss_and_keep(self: Any, o: torch.Tensor, z: torch.Tensor, labels: Any) -> Any:
        if torch.is_grad_enabled():
            return chunk_loss(self, o, z, labels)
        kept["routers_JBC"].append(z)
        keep = self.lm_head.register_forward_hook(
            lambda _head, _args, logits: kept["logits_NCV"].append(logits.clone())
        )
        with keep:
            return chunk_loss(self, o, z, labels)

    NviumValidator.validate = validate_anew  # type: ignore[method-assign]
    NviumValidator.post_dataloading_process = process_and_keep  # type: ignore[method-assign]
    MixtureLoss._chunk_loss = chunk_loss_and_keep  # type: ignore[method-assign]
    return kept


def main() -> None:
    use_cpu_without_accelerator()
    from nvium_titan.train import launch as train
    from nvium_titan.train.trainer import NviumTrainer

    rank = os.environ["RANK"]
    folder: list[Path] = []
    steps: Steps = []
    kept = keep_validated()
    close, train_step = NviumTrainer.close, NviumTrainer.train_step

    def close_and_keep(self: Any) -> None:
        torch.save(local_pieces(self.model_parts), folder[-1] / f"rank-{rank}.pt")
        torch.save(kept, folder[-1] / f"validated-{rank}.pt")
        (folder[-1] / f"steps-{rank}.json").write_text(json.dumps(steps))
        close(self)

    def train_step_and_count(self: Any, data_iterator: Any) -> None:
        train_step(self, data_iterator)
        balance, compute = self.loss_fn._balance_weight, self.loss_fn._compute_weight
        weights = {"balance": balance.item(), "compute": compute.item()}
        steps.append({"step": self.step, "live_bytes": live_bytes(), **weights})

    NviumTrainer.close = close_and_keep  # type: ignore[method-assign]
    NviumTrainer.train_step = train_step_and_count  # type: ignore[method-assign]
    for run in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()  # nothing has run yet: no threads, no groups, no mesh
        if child == 0:
            os.environ["MASTER_PORT"] = str(run["port"])
            folder.append(Path(run["folder"]))
            code = 1
            try:
                code = train.main([*run["words"], "--dump_folder", run["folder"]])
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
