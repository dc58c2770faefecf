"""The machine under a benchmark: what it is, and whether anything else uses it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from nvium_titan import __version__
from nvium_titan.report.bench_records import Cpu

MATTERING_FLAGS = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8",
)  # fmt: skip
"""Instruction sets that decide how fast a type of weights is."""

PEAK_BF16_TFLOPS = {
    "A100": 312, "H20-": 148, "H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989,
    "B200": 2250, "L40S": 362, "L4": 121, "MI250X": 383, "MI300X": 1307,
}  # fmt: skip
"""10^12 dense bfloat16 operations per second, from the vendors' data sheets, by a part of the
device's name; the longest match counts."""

_WATCH_S = 0.5


def describe_cpu() -> Cpu:
    """Return the CPU, and how busy other processes keep it while this one sleeps half a second."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    return Cpu(
        name=name,
        num_cores=os.cpu_count() or 1,
        flags=[flag for flag in MATTERING_FLAGS if flag in flags],
        busy_cores=_busy_cores(),
    )


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def package_versions() -> dict[str, str]:
    """Return the versions of nvium_titan and torch."""
    return {"nvium_titan": __version__, "torch": torch.__version__}


def peak_flops(name: str, *, dtype: str) -> float | None:
    """Return the peak operations per second of the device of this name in bfloat16, if known.

    Example:
        "NVIDIA H200" in bfloat16 gives 989e12, any CPU gives None.
    """
    found = [part for part in PEAK_BF16_TFLOPS if part in name]
    if dtype != "bfloat16" or not found:
        return None
    return 1e12 * PEAK_BF16_TFLOPS[max(found, key=len)]


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _busy_cores() -> float:
    """Return the cores in use while this process sleeps; without /proc, the load average."""
    before = _busy_ticks()
    if before is None:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    time.sleep(_WATCH_S)
    after = _busy_ticks()
    assert after is not None, "/proc/stat has gone"
    return (after - before) / os.sysconf("SC_CLK_TCK") / _WATCH_S


def _busy_ticks() -> int | None:
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4]
