"""`spiderfs top`: its pages at 80 columns and 24 lines, and what it says of figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import mount_table, refusal, spiderfs
from rich.console import Console, RenderableType

from spiderfs.cli import figures
from spiderfs.cli.control_files import read_stats
from spiderfs.cli.top import VIEWS, Change, Look, Meter, page, sparkline
from spiderfs.linux.mounts import Mount

JOB = {"job": "3f2a", "name": "best", "epoch": 4, "epochs": 90, "samples": 200, "samples_per_s": 812.34}
JOB |= {"hits": 150, "substitutes": 1700, "exchanged": 5}
PLAN = {"list": "train", "epoch": 4, "taken": 5000, "length": 20_000, "ready_s": 2.5, "late_share": 0.013}
STATS: dict[str, Any] = {
    "policy": "spider",
    "pid": 4711,
    "capacity_bytes": 10 * 2**30,
    "used_bytes": 2 * 2**30,
    "entries": 12_345,
    "sections": {"landing": {"bytes": 2**30, "entries": 12}, "empty": {"bytes": 0, "entries": 0}, "odd": 3},
    "workers": 2,
    "uptime_s": 3700.5,
    "jobs": [JOB, {"job": "other"}],
    "plans": [PLAN, {**PLAN, "trusted": False}],
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
        made.update(read_stats(made.mount), float(look))
    return made


def shown(drawn: RenderableType) -> list[str]:
    text = io.StringIO()
    Console(width=80, file=text).print(drawn)
    return text.getvalue().splitlines()


def test_one_mount_fits_the_smallest_terminal(tmp_path: Path) -> None:
    lines = shown(page([meter(tmp_path, looks=300)]))
    assert len(lines) <= 23, "a line is for the keys"
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for expected in (
        "policy spider, 2 workers, pid 4711, up 1:01:40",
        "hit rate              90.0%",
        "files/s                 100",
        "readers waiting         1.5",
        "source/s            1.0 MiB",
        "fetches ahead  7 in flight, 12.3 ms each, 1.0 MiB/s",
        "cache          2.0 GiB of 10.0 GiB, 12,345 records",
        "job   best: epoch 4 of 90, 812 samples/s, 75.0% hits, 2.5% exchanged, 1,700",
        "plan  train, epoch 4: 5,000 of 20,000, 2.5 s ready ahead, 1.3% late",
        "not followed",
        "1,375 answered by the page cache",
        "50 of the opens, of files younger than 2 s: not cached yet",
    ):
        assert expected in text, text
    assert "restarts" not in text
    assert "landing" not in text


def test_the_view_of_the_status_has_what_the_command_shows(tmp_path: Path) -> None:
    watched = meter(tmp_path)
    pages = [shown(page([watched], Look(view=VIEWS.index("status"), page=number))) for number in (0, 1)]
    assert all(len(lines) <= 23 for lines in pages)
    assert max(len(line) for lines in pages for line in lines) <= 80
    text = "\n".join(line for lines in pages for line in lines)
    for row in figures.all_rows(watched.stats):
        assert str(row)[:70] in text
    assert "  landing        1.0 GiB, 12 records" in text


def test_a_bar_has_a_scale_and_what_is_shown_as_nothing_has_none(tmp_path: Path) -> None:
    lines = {line[:15].strip(): line[15:].split() for line in shown(page([meter(tmp_path)])) if line.strip()}
    assert lines["readers waiting"] == ["1.5", "█", "max", "1.5"]
    idle = meter(tmp_path, looks=1, name="idle")
    idle.update({**STATS, "metrics": {"opens": 7, "stall_microseconds": 1}}, 1.0)
    lines = {line[:15].strip(): line[15:].split() for line in shown(page([idle])) if line.strip()}
    assert lines["readers waiting"] == ["0.0"]
    assert lines["files/s"] == ["7.0", "█", "max", "7.0"]


def test_keys_choose_a_mount_a_view_and_a_page(tmp_path: Path) -> None:
    one, two = meter(tmp_path), meter(tmp_path, name="two")
    look = Look()
    look.press("n", [one])
    assert look.of([one]) is one
    assert look.of([one, two]) is None
    look.press("v", [one, two])
    assert look.view == 0, "a list has no views"
    assert look.line([one, two]).plain == "q quit   n next mount (list)"
    look.press("n", [one, two])
    look.press("v", [one, two])
    look.press("v", [one, two])
    look.press(" ", [one, two])
    assert (look.of([one, two]), look.page) == (one, 1)
    line = look.line([one, two]).plain
    assert line == "q quit   v view (metrics)   space more   n next mount (1 of 2)"
    assert len(line) <= 80
    look.press("n", [one, two])
    look.press("x", [one, two])
    assert (look.of([one, two]), look.page) == (two, 0)
    look.press("n", [one, two])
    assert look.of([one, two]) is None
    assert look.of([]) is None
    # The mount that was looked at may go away.
    assert Look(mount=2).of([one]) is one


def test_all_metrics_are_on_some_page(tmp_path: Path) -> None:
    names = {f"metric_{number:03d}" for number in range(90)}
    watched = meter(tmp_path)
    watched.update({**STATS, "metrics": dict.fromkeys(names, 1)}, 9.0)
    pages = [shown(page([watched], Look(view=VIEWS.index("metrics"), page=number))) for number in range(4)]
    assert all(len(lines) <= 23 for lines in pages)
    assert pages[3] == pages[0]
    found = {word for lines in pages for line in lines for word in line.split()}
    assert names <= found


def test_stats_of_another_version_do_no_harm(tmp_path: Path) -> None:
    strange = {
        "jobs": 3,
        "plans": [1],
        "sections": [],
        "capacity_bytes": "much",
        "fetches_ahead": None,
        "uptime_s": None,
    }
    strange |= {"pins": 7, "peers": [1]}
    for view in range(len(VIEWS)):
        assert shown(page([meter(tmp_path, stats=strange)], Look(view=view), everything=True))
    assert "no answer yet" in shown(page([meter(tmp_path, looks=0)]))


def test_rates_begin_with_the_command_and_survive_a_new_mount() -> None:
    assert Change.between({"opens": 900}, {"opens": 5}, 1.0).opens == 0
    nothing = Change.together([])
    assert (nothing.hit_rate, nothing.per_s(3.0)) == (None, 0.0)
    assert sparkline([0, 1, 2, 4]) == " ▃▅█"
    assert sparkline([0.5], most=1.0) == "▅"
    assert sparkline([]) == ""


def test_it_draws_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = spiderfs("top", tmp_path)
    assert result.exit_code == 2
    assert "draws on a terminal: use 'spiderfs status'" in result.output
    terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("spiderfs.cli.top.sys", terminal)
    mount_table(monkeypatch, tmp_path)
    assert refusal("top") == "spiderfs: there is no spiderfs mount: 'spiderfs mount SOURCE MOUNTPOINT' makes one\n"
