"""The README and the pages of docs/: made parts are up to date, links and commands are right."""

from __future__ import annotations

import importlib.util
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from nvium_titan import cli
from nvium_titan.report.bench_records import read_report

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def nvium_commands() -> list[str]:
    """Return every line of the pages that calls nvium, without a pipe into it or a file out."""
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.split("\n")]
    found = [re.fullmatch(r"(?:.* \| )?nvium (.*?)(?: > .*)?", line) for line in lines]
    return [match[1] for match in found if match]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short_and_says_what_a_newcomer_needs() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 130
    for need in ("make demo", "make test", "pip install", "## Exit codes", "(LICENSE)"):
        assert need in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_picture_is_what_its_script_draws() -> None:
    script = tool("draw_picture")
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture()
    root = ET.fromstring(script.picture())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert script.picture().isascii()


def test_the_picture_runs_every_row_of_a_block_at_most_once_and_in_order() -> None:
    script = tool("draw_picture")
    for block in range(1, script.NUM_BLOCKS + 1):
        calls = [call for call in script.block_calls() if call.block == block]
        rows = [row for call in calls for row in range(call.first, call.last + 1)]
        assert rows == list(range(len(rows)))
        ends = [token for token, number in enumerate(script.EXITS) if number >= block]
        assert [call.last for call in calls] == ends


def test_the_tables_are_what_the_records_say() -> None:
    script = tool("benchmark_tables")
    assert script.records()
    assert script.PAGE.read_text(encoding="utf-8") == script.page()


def test_a_table_has_a_row_per_system_and_shows_no_ratio_that_did_not_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tool("benchmark_tables")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    record = tmp_path / "loud.json"
    text = script.records()[0].read_text(encoding="utf-8")
    report = read_report(script.records()[0])
    for is_settled in ("true", "false"):
        record.write_text(re.sub(r'"conclusive": \w+', f'"conclusive": {is_settled}', text))
        lines = list(script.section(record))
        rows = [line for line in lines if line.startswith("| float") or line.startswith("| int8")]
        assert len(rows) == sum(len(entry.systems) for entry in report.dtypes)
        assert f"`{report.command} > loud.json`" in lines
        not_settled = ["not settled" in row for row in rows if "| N-vium |" not in row]
        assert set(not_settled) == {is_settled == "false"}


def test_measuring_repeats_the_command_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tool("benchmark_tables")
    record = tmp_path / "again.json"
    text = script.records()[0].read_bytes()
    record.write_bytes(text)
    calls = []

    def run(command: list[str], **_: object) -> object:
        calls.append(command)
        return script.subprocess.CompletedProcess(command, 0 if len(calls) == 1 else 2, b"new")

    monkeypatch.setattr(script.subprocess, "run", run)
    script.measure(record)
    assert record.read_bytes() == b"new"
    assert shlex.join(["nvium", *calls[0][3:]]) == read_report(script.records()[0]).command
    record.write_bytes(text)
    with pytest.raises(script.NviumError, match="ended with 2"):
        script.measure(record)
    assert record.read_bytes() == text


def test_the_pages_call_nvium() -> None:
    assert len(nvium_commands()) > 20


@pytest.mark.parametrize("line", nvium_commands())
def test_every_command_of_the_pages_is_one(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    if words[0] != "train":
        cli.parse(words)
        return
    pytest.importorskip("torchtitan")
    from nvium_titan.train import launch

    (tmp_path / "my.toml").write_text(blocks(ROOT / "docs" / "training.md", "toml")[0])
    at = words.index("--config-file") + 1
    words[at] = str((tmp_path if words[at] == "my.toml" else ROOT) / words[at])
    if "--world-size" in words:
        at = words.index("--world-size")
        del words[at : at + 2]
    launch.load([word for word in words[1:] if word != "--dry-run"])
