"""`spiderfs top`: its pages at 80 columns and 24 lines, and what it says of figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console, RenderableType

from spiderfs.cli.main import main
from spiderfs.cli.top import Change, Meter, page, remarks, sparkline
from spiderfs.linux import mounts
from spiderfs.linux.mounts import Mount

JOB = {"job": "3f2a", "name": "best", "epoch": 4, "epochs": 90, "samples": 200, "samples_per_s": 812.34}
JOB |= {"hits": 150, "stand_ins": 1700, "exchanged": 5}
PLAN = {"list": "train", "epoch": 4, "taken": 5000, "length": 20_000, "ready_s": 2.5, "late_share": 0.013}
STATS: dict[str, Any] = {
    "policy": "spider",
    "pid": 4711,
    "capacity_bytes": 10 * 2**30,
    "used_bytes": 2 * 2**30,
    "entries": 12_345,
    "sections": {"landing": {"bytes": 2**30, "entries": 12}, "odd": 3},
    "workers": 2,
    "uptime_s": 3700.5,
    "jobs": [JOB, {"job": "other"}],
    "plans": [PLAN, {**PLAN, "believed": False}],
    "fetches_ahead": {"under_way": 7, "latency_s": 0.0123, "bytes_per_s": 1 << 20},
}


def meter(tmp_path: Path, looks: int = 2, stats: dict[str, Any] = STATS, name: str = "mnt") -> Meter:
    """A mount that was looked at once a second, and has served 100 files more each time, 10 of them by waiting."""
    control = tmp_path / name / ".spiderfs"
    control.mkdir(parents=True, exist_ok=True)
    made = Meter(Mount("/nfs/a", tmp_path / name, "fuse.spiderfs", "0:50"))
    for look in range(looks):
        metrics = {"opens": 100 * look, "opens_hit": 90 * look, "stall_microseconds": 1_500_000 * look}
        metrics |= {"origin_bytes": look << 20, "opens_young": 50, "worker_restarts": 0, "note": "text"}
        metrics |= {"page_cache_reads": 1375, "source_reachable": 1.0}
        (control / "stats.json").write_text(json.dumps({**stats, "metrics": metrics}))
        made.look(float(look))
    return made


def shown(drawn: RenderableType) -> list[str]:
    text = io.StringIO()
    Console(width=80, file=text).print(drawn)
    return text.getvalue().splitlines()


def test_one_mount_fits_the_smallest_terminal(tmp_path: Path) -> None:
    lines = shown(page([meter(tmp_path, looks=300)]))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for expected in (
        "policy spider, 2 workers, pid 4711, up 1:01:40",
        "hit rate              90.0%",
        "files/s                 100",
        "readers waiting         1.5",
        "source/s            1.0 MiB",
        "7 fetches ahead in flight, 12.3 ms each, 1.0 MiB/s",
        "cache  2.0 GiB of 10.0 GiB, 12,345 records",
        "job best: epoch 4 of 90, 812 samples/s, 75.0% hits, 2.5% exchanged, 1,700 stand",
        "plan train, epoch 4: 5,000 of 20,000, 2.5 s ready, 1.3% late",
        "not followed",
        "page cache: 1,375 reads",
        "50 opens of files younger than 2 s: not cached yet",
    ):
        assert expected in text, text
    assert "restarts" not in text
    assert "landing" not in text


def test_all_shows_what_is_zero_too(tmp_path: Path) -> None:
    text = "\n".join(shown(page([meter(tmp_path)], everything=True)))
    assert "landing" in text
    assert "worker_restarts" in text


def test_stats_of_another_version_do_no_harm(tmp_path: Path) -> None:
    strange = {
        "jobs": 3,
        "plans": [1],
        "sections": [],
        "capacity_bytes": "much",
        "fetches_ahead": None,
        "uptime_s": None,
    }
    assert shown(page([meter(tmp_path, stats=strange)], everything=True))
    assert shown(page([meter(tmp_path, looks=0)]))


def test_several_mounts_have_a_line_each(tmp_path: Path) -> None:
    lost = meter(tmp_path, name="lost")
    (tmp_path / "lost/.spiderfs/stats.json").unlink()
    lost.look(9.0)
    lines = shown(page([meter(tmp_path), lost]))
    assert max(map(len, lines)) <= 80
    assert any("90.0%" in line and "20.0%" in line for line in lines)
    assert "was unmounted meanwhile" in " ".join(" ".join(lines).split())


def test_rates_begin_with_the_command_and_survive_a_new_mount() -> None:
    assert Change.between({"opens": 900}, {"opens": 5}, 1.0).opens == 0
    nothing = Change.together([])
    assert (nothing.hit_rate, nothing.per_s(3.0)) == (None, 0.0)
    assert sparkline([0, 1, 2, 4]) == " ▃▅█"
    assert sparkline([0.5], most=1.0) == "▅"
    assert sparkline([]) == ""


def test_troubles_are_named() -> None:
    assert remarks({"source_reachable": 0.0, "worker_restarts": 2.0, "opens": 7}) == [
        "the source does not answer",
        "since mounted: 2 worker_restarts",
    ]


def test_it_draws_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["top", str(tmp_path)])
    assert result.exit_code == 2
    assert "draws on a terminal: use 'spiderfs status'" in result.output
    terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("spiderfs.cli.top.sys", terminal)
    (tmp_path / "table").touch()
    monkeypatch.setattr(mounts, "MOUNT_TABLE", tmp_path / "table")
    result = CliRunner().invoke(main, ["top"])
    assert (result.exit_code, result.stderr) == (
        1,
        "spiderfs: there is no spiderfs mount: 'spiderfs mount SOURCE MOUNTPOINT' makes one\n",
    )
