"""Every shim that torchtitan 0.3.0 needs, each with its reason and the day it can go.

On a CPU three things are missing from torchtitan: a device module, FSDP reductions that gloo knows,
and an attention with a backward pass (`train.model.model.PortableAttention`).
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
import types
from typing import Any

import torch
import torch._utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvium_titan.errors import DependencyError

SUPPORTED_TORCHTITAN = "0.3.0"
MINIMUM_TORCH = (2, 14)


def require_torchtitan() -> None:
    """Check that the supported torchtitan and a new enough torch are installed.

    Raises:
        DependencyError: If either is missing or of another version.
    """
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != SUPPORTED_TORCHTITAN:
        raise DependencyError(
            f"training needs torchtitan {SUPPORTED_TORCHTITAN}, found {found}; "
            "fix: pip install 'nvium-titan[train]' (decoding works without torchtitan)"
        )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        raise DependencyError(
            f"training needs torch >= {'.'.join(map(str, MINIMUM_TORCH))}, found "
            f"{torch.__version__}; fix: pip install 'nvium-titan[train]' "
            "(decoding works with torch >= 2.11)"
        )


class _CpuProperties:
    name = "cpu"

    @property
    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the device and memory functions that torchtitan calls on its device."""

    def __init__(self) -> None:
        super().__init__("nvium_titan_cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> _CpuProperties:
        return _CpuProperties()

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def set_device(self, device: object) -> None:
        pass

    def current_device(self) -> int:
        return 0


def use_cpu_without_accelerator() -> None:
    """Make torchtitan train on the CPU, over gloo, if there is no accelerator; call it first.

    Raises:
        DependencyError: If torchtitan was imported before, and has chosen "cuda".
    """
    if torch.accelerator.is_available():
        return
    # `torchtitan.tools.utils` picks the device when it is imported, and falls back to "cuda". This
    # can go once it falls back to the CPU.
    loaded = sys.modules.get("torchtitan.tools.utils")
    if loaded is not None:
        if loaded.device_type != "cpu":
            raise DependencyError(
                "no accelerator here, and torchtitan was imported before it could be told so; "
                "launch with python -m nvium_titan.train, which trains on the CPU too"
            )
        return
    utils: Any = torch._utils
    available, module_of = utils._get_available_device_type, utils._get_device_module
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda kind: _CpuModule() if kind == "cpu" else module_of(kind)
    try:
        from torchtitan.tools import utils as titan_utils
    finally:
        utils._get_available_device_type, utils._get_device_module = available, module_of
    # It runs lspci to find an H100, then warns, twice a run, that it takes the CPU for an A100.
    # With no peak known, the share of the peak (mfu) reads 0.
    titan_utils.get_peak_flops = lambda _device_name: math.inf


def sum_gradients_without_premul(model: nn.Module) -> None:
    """Let FSDP reduce gradients by a plain sum."""
    # torchtitan sets a gradient divide factor of 1, which FSDP2 turns into PREMUL_SUM; gloo has no
    # such operation. This can go once FSDP2 takes a factor of 1 for a plain sum.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
