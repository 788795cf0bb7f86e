"""The command that runs all benchmarks: order, resuming, timeouts, load, and whether kept figures are still true."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from programs import program
from rich.console import Console

from benchmarks import all as runner
from benchmarks import tables
from benchmarks.all import Benchmark, Figure, Settings
from benchmarks.common import command

ROOT = Path(__file__).resolve().parents[3]
# They need a virtual machine, made by scripts/nfs.
OTHERS = {"nfs-default", "nfs-faults", "nfs-short", "nfs-soft"}
# No machine was quiet for long enough yet, or none with a GPU was free.
NOT_YET = {"samplers-3k", "papers_recipe", "partition_sizes", "device_steps", "churn", "churn-gigabytes"}

FAKE = '''
"""Writes a result, or fails, hangs or leaves a process behind, as its first argument says."""
import json, os, subprocess, sys, time

kind, *words = sys.argv[1:]
file = words[words.index("--json") + 1]
with open(os.environ["BEGUN"], "a") as begun:
    begun.write(f"{os.path.basename(file)} {os.getpid()}\\n")
if kind == "fail":
    sys.exit("no such disk")
if kind in ("hang", "leave"):
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with open(os.environ["BEGUN"], "a") as begun:
        begun.write(f"sleep {left.pid}\\n")
if kind == "hang":
    time.sleep(60)
with open(file, "w") as result:
    machine = {"time": "2026-01-02", "cores": 2}
    json.dump({"machine": machine, "rates": [float(kind), 4.0] if kind[0].isdigit() else []}, result)
'''


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    package = tmp_path / "fakes"
    package.mkdir()
    (package / "fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    monkeypatch.setattr(runner, "QUIET_CORES", float("inf"))
    monkeypatch.setattr(runner, "QUIET_SAMPLE_S", 0.01)
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    (tmp_path / "kept").mkdir()
    return Settings(tmp_path / "out", quick=False, results=tmp_path / "kept", package="fakes", patience_s=0.0)


def begun(settings: Settings) -> dict[str, int]:
    """What has begun, with its process."""
    lines = (settings.out.parent / "begun").read_text().splitlines()
    return {name.removesuffix(".json"): int(pid) for name, pid in map(str.split, lines)}


def fake(name: str, kind: str = "2", **fields: Any) -> Benchmark:
    return Benchmark(name, f"fake {kind}", minutes=1, quick=kind, **fields)


def run(settings: Settings, *benchmarks: Benchmark, minutes: float = 60) -> tuple[list[str], bool]:
    return runner.run(list(benchmarks), settings, minutes, Console(quiet=True))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_result_is_kept_with_its_load(settings: Settings) -> None:
    run(settings, fake("a"))
    machine = json.loads((settings.results / "a.json").read_text())["machine"]
    assert machine.pop("others_cores") >= 0
    assert 0 <= machine.pop("seconds") < 60
    assert machine == {"time": "2026-01-02", "cores": 2, "loaded": False, "command": "fake 2"}


def test_the_same_command_continues(settings: Settings) -> None:
    several = [fake("a"), fake("b"), fake("c", "fail"), fake("d")]
    assert run(settings, *several[:3], minutes=0) == ([], True)
    assert list(begun(settings)) == ["a"]
    failures, left = run(settings, *several)
    assert (failures, left) == (["c: failed with 1: no such disk"], False)
    lines = (settings.out.parent / "begun").read_text().split()[::2]
    assert lines == ["a.json", "b.json", "c.json", "d.json"]
    # What failed is tried again, alone.
    run(settings, *several)
    assert (settings.out.parent / "begun").read_text().split()[::2] == [*lines, "c.json"]


def test_what_another_commit_began_is_not_continued(settings: Settings) -> None:
    settings.out.mkdir()
    settings.file(fake("a")).write_text("{}")
    (settings.out / "state.json").write_text(json.dumps({"quick": False, "commit": "other", "records": {}}))
    runner.State(settings, ["a"])
    assert not settings.file(fake("a")).exists()


def test_what_hangs_is_ended_with_all_that_it_started(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TIMEOUT_FACTOR", 1 / 60)
    monkeypatch.setattr(runner, "END_PATIENCE_S", 0.2)
    failures, _ = run(settings, fake("a", "hang"), fake("b"))
    assert failures == ["a: timed out after 0 minutes"]
    assert [name for name, pid in begun(settings).items() if is_alive(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_what_runs(settings: Settings, number: signal.Signals) -> None:
    code = f"""
import sys
from pathlib import Path
from rich.console import Console
from benchmarks import all as runner
from benchmarks.all import Benchmark, Settings
from benchmarks.common.interruption import exit_status
runner.END_PATIENCE_S = 0.2
settings = Settings(Path({str(settings.out)!r}), False, package="fakes")
hangs = [Benchmark("a", "fake hang", 1, quiet=False)]
sys.exit(exit_status("all", lambda: runner.run(hangs, settings, 9, Console(quiet=True)), "interrupted"))
"""
    with program(sys.executable, "-c", code, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not (settings.out.parent / "begun").exists() or "sleep" not in begun(settings):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.communicate()[0] == b"interrupted\n"
        assert process.returncode == 130
    assert [name for name, pid in begun(settings).items() if is_alive(pid)] == []


RATE = Figure(["rates", 0])


def kept(settings: Settings, name: str, rate: float) -> None:
    (settings.results / f"{name}.json").write_text(json.dumps({"rates": [rate, 4.0]}))


def test_a_quick_run_names_figures_that_are_no_longer_true(settings: Settings) -> None:
    quick = settings._replace(quick=True)
    kept(settings, "a", 3.0)
    kept(settings, "b", 4.1)
    failures, _ = run(quick, fake("a", figures=(RATE,)), fake("b", figures=(RATE, Figure(["rates", 1]))))
    assert failures == ["b: rates 0 is 2, kept 4.1 (allowed 0.5 to 2 x)"]
    assert json.loads((settings.results / "a.json").read_text())["rates"] == [3.0, 4.0]


def test_a_busy_machine_refuses_a_full_run_and_excuses_times(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "QUIET_CORES", 0.0)
    failures, _ = run(settings, fake("a"), fake("b", quiet=False))
    (failure,) = failures
    assert re.fullmatch(r"a: refused: other processes use [\d.]+ cores", failure)
    assert list(begun(settings)) == ["b"]
    counted = Figure(["rates", 0], timed=False)
    for name in ("c", "d"):
        kept(settings, name, 9.0)
    failures, _ = run(settings._replace(quick=True), fake("c", figures=(RATE,)), fake("d", figures=(counted,)))
    assert failures == ["d: rates 0 is 2, kept 9 (allowed 0.5 to 2 x)"]
    records = json.loads((settings.out / "state.json").read_text())["records"]
    assert records["c"]["loaded"]


TABLE = runner.table_of_benchmarks()


def test_the_table_names_modules_and_kept_results() -> None:
    for benchmark in TABLE:
        module = benchmark.run.split()[0]
        assert (ROOT / "benchmarks" / module.replace(".", "/")).with_suffix(".py").exists(), benchmark.name
        assert (benchmark.quick is not None) == bool(benchmark.figures), benchmark.name
    results = {path.stem for path in tables.RESULTS.glob("*.json")}
    assert {benchmark.name for benchmark in TABLE} | OTHERS == results | NOT_YET


@pytest.mark.thorough
@pytest.mark.parametrize("benchmark", TABLE, ids=lambda benchmark: benchmark.name)
def test_its_commands_are_understood(benchmark: Benchmark, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    understood = []
    monkeypatch.setattr(command, "main", lambda measure, parser: understood.append(command.parsed(parser)))
    given = settings._replace(data=ROOT, photos=ROOT, package="benchmarks")
    for quick in (False, True)[: 1 if benchmark.quick is None else 2]:
        _, _, module, *arguments = runner.command_of(benchmark, given._replace(quick=quick))
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.delitem(sys.modules, module, raising=False)
        runpy.run_module(module, run_name="__main__")
    assert len(understood) == (1 if benchmark.quick is None else 2)


def test_the_kept_figures_are_true_of_themselves() -> None:
    for benchmark in TABLE:
        for figure in benchmark.figures:
            assert figure.value(tables.kept(benchmark.name)) > 0, f"{benchmark.name}: {figure}"
            assert figure.bounds[0] < 1 < figure.bounds[1], f"{benchmark.name}: {figure}"


# -- tables


def test_a_table_is_written_between_its_markers() -> None:
    text = "before\n\n<!-- table: epoch -->\nold\n<!-- end -->\nafter\n"
    new = tables.renewed(text)
    assert new.startswith("before\n\n<!-- table: epoch -->\n\n| | files/s | x direct |")
    assert new.endswith("Linux 6.18.44.\n\n<!-- end -->\nafter\n")
    assert "old" not in new
    assert tables.renewed(new) == new
