"""Write the tables of docs/benchmarks.md from the records in docs/benchmarks/.

    python tools/benchmark_tables.py              from the records as they are
    python tools/benchmark_tables.py --measure    first repeat each record's own command

A record is what `nvium bench ... --json` prints. It holds its command, so it can be repeated, and
a new one joins the page by lying in the folder.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nvium_titan.errors import NviumError
from nvium_titan.files import replacing
from nvium_titan.report.bench_records import BenchReport, DtypeFigures, read_report

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "docs" / "benchmarks"
BEGIN = "<!-- Written by tools/benchmark_tables.py; do not edit. -->\n"
END = "<!-- End of what tools/benchmark_tables.py writes. -->\n"


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="repeat the commands first")
    try:
        if parser.parse_args().measure:
            for record in records():
                measure(record)
        PAGE.write_text(page(), encoding="utf-8")
    except NviumError as error:
        print(f"benchmark_tables: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def records() -> list[Path]:
    """Return the records, in the order of the page."""
    return sorted(RECORDS.glob("*.json"))


def measure(record: Path) -> None:
    """Repeat the command of a record; the new one replaces it once the run is whole.

    Raises:
        NviumError: If the command fails.
    """
    words = shlex.split(read_report(record).command)[1:]
    command = [sys.executable, "-m", "nvium_titan.cli", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise NviumError(f"{record}: {shlex.join(command)} ended with {done.returncode}")
    with replacing(record) as file:
        file.write(done.stdout)


def page() -> str:
    """Return the page with its tables made anew; the prose around them stays."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    tables = "\n".join(line for record in records() for line in section(record))
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def section(record: Path) -> Iterator[str]:
    """Yield the lines of one record: the command, the model, the machine, a table."""
    report = read_report(record)
    yield f"### {record.stem}"
    yield ""
    yield f"`{report.command} > {record.relative_to(ROOT)}`"
    yield ""
    yield f"{_model(report)} {_machine(report)}"
    yield ""
    yield "| type | system | ms/token (quartiles) | first token, ms | N-vium is | spread | limit |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for entry in report.dtypes:
        yield from _rows(entry)
    yield ""


def _model(report: BenchReport) -> str:
    shares = "left to the routers"
    if report.forced_shares is not None:
        shares = "forced to " + ", ".join(f"{share:g}" for share in report.forced_shares)
    batch = "" if report.batch == 1 else f", {report.batch} sequences at once, {report.schedule}"
    return (
        f"{report.num_params / 1e6:,.1f} M parameters, exits after layers "
        f"{', '.join(map(str, report.exits))}, {shares}; {report.prompt_tokens} tokens of prompt, "
        f"{report.new_tokens} new{batch}, {report.dtypes[0].num_pairs} pairs."
    )


def _machine(report: BenchReport) -> str:
    cpu = report.cpu
    busy = f" Others kept {cpu.busy_cores:.1f} cores busy." if cpu.is_busy else ""
    device = "" if report.device == "cpu" else f"Our engine on {report.device}. "
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    return (
        f"{device}{cpu.name}, {cpu.num_cores} cores ({' '.join(cpu.flags)}), {threads}, "
        f"nvium_titan {report.versions['nvium_titan']}, torch {report.versions['torch']}.{busy}"
    )


def _rows(entry: DtypeFigures) -> Iterator[str]:
    """Yield a row per system, N-vium first; a ratio that did not settle is not shown."""
    ratios = [None, entry.over_dense, *entry.other_ratios]
    for system, ratio in zip(entry.systems, ratios, strict=True):
        ms = system.ms_per_token
        shown = spread = limit = ""
        if ratio is not None:
            shown = f"**{ratio.ratio:.2f}x**" if ratio.conclusive else "not settled"
            spread = f"{ratio.spread:.0%}"
        if system.name == "dense" and entry.limit is not None:
            limit = f"{entry.limit:.2f}x"
        yield (
            f"| {system.dtype} | {system.name} | {ms.median:.3g} ({ms.q1:.3g} to {ms.q3:.3g}) "
            f"| {system.ttft_ms:.3g} | {shown} | {spread} | {limit} |"
        )


if __name__ == "__main__":
    sys.exit(main())
