"""`spiderfs status --watch`: shows a mount's stats.json as a page that is drawn again every second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeGuard

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spiderfs.cli.control_files import printable, read_stats
from spiderfs.linux.mounts import Mount
from spiderfs.options.units import round_size

REFRESH_INTERVAL_S = 1.0


def watch_stats(mount: Mount) -> None:
    """Draw the page every second until Ctrl-C; raises OSError when the mount ends or hangs."""
    before: Mapping[str, Any] = {}
    before_at = 0.0
    with Live(auto_refresh=False) as live:
        try:
            while True:
                stats, at = read_stats(mount), time.monotonic()
                live.update(page(stats, rates(stats, before, at - before_at)), refresh=True)
                before, before_at = stats, at
                time.sleep(REFRESH_INTERVAL_S)
        except KeyboardInterrupt:
            pass


def rates(stats: Mapping[str, Any], before: Mapping[str, Any], elapsed_s: float) -> dict[str, float]:
    """The change per second of every metric that is a number in both stats."""
    now, then = _table(stats, "metrics"), _table(before, "metrics")
    return {
        name: (now[name] - then[name]) / elapsed_s
        for name in now.keys() & then.keys()
        if _is_number(now[name]) and _is_number(then[name]) and elapsed_s > 0
    }


def page(stats: Mapping[str, Any], rates_per_s: Mapping[str, float]) -> RenderableType:
    """The page for one stats.json; a missing key, or a key of a newer version, does no harm."""
    parts: list[RenderableType] = [
        Text(printable(f"{stats.get('source', '?')} on {stats.get('mountpoint', '?')}"), style="bold"),
        Text(
            f"spiderfs {stats.get('version', '?')}, policy {stats.get('policy', '?')},"
            f" workers {stats.get('workers', '?')}, pid {stats.get('pid', '?')}, up {_uptime(stats.get('uptime_s'))}"
        ),
    ]
    used, capacity = stats.get("used_bytes"), stats.get("capacity_bytes")
    if _is_number(used) and _is_number(capacity) and capacity > 0:
        parts.append(Text(f"{round_size(used)} of {round_size(capacity)} in {stats.get('entries', '?')} entries"))
        parts.append(_bar(used, capacity))
    parts += _jobs(stats)
    parts += _plans(stats)
    sections = _table(stats, "sections")
    if sections:
        table = Table("section", box=None)
        table.add_column("size", justify="right")
        table.add_column("entries", justify="right")
        for name, section in sections.items():
            section = section if isinstance(section, dict) else {}
            size = section.get("bytes")
            table.add_row(name, round_size(size) if _is_number(size) else "?", str(section.get("entries", "?")))
        parts.append(table)
    metrics = _table(stats, "metrics")
    if metrics:
        table = Table("metric", box=None)
        table.add_column("value", justify="right")
        table.add_column("per second", justify="right")
        for name, value in metrics.items():
            rate = rates_per_s.get(name, 0.0)
            table.add_row(name, f"{value:,.12g}" if _is_number(value) else str(value), f"{rate:,.1f}" if rate else "")
        parts.append(table)
    return Group(*parts)


def _jobs(stats: Mapping[str, Any]) -> list[RenderableType]:
    jobs = stats.get("jobs")
    if not isinstance(jobs, list) or not jobs:
        return []
    table = Table("job", "name", box=None)
    for heading in ("ranks", "epoch", "samples/s", "hits", "origin bytes", "stand-ins", "exchanged", "saved"):
        table.add_column(heading, justify="right")
    for job in jobs:
        job = job if isinstance(job, dict) else {}
        samples, hits, size = job.get("samples"), job.get("hits"), job.get("origin_bytes")
        saved = job.get("saved_bytes")
        pids, rate = job.get("pids"), job.get("samples_per_s")
        epochs = f" of {job['epochs']}" if job.get("epochs") else ""
        table.add_row(
            Text(printable(str(job.get("job", "?")))),
            Text(printable(str(job.get("name") or ""))),
            f"{len(pids) if isinstance(pids, list) else '?'} of {job.get('world_size', '?')}",
            f"{job.get('epoch', '?')}{epochs}",
            f"{rate:,.1f}" if _is_number(rate) else "?",
            f"{hits / max(1, samples):.1%}" if _is_number(samples) and _is_number(hits) else "?",
            round_size(int(size)) if _is_number(size) else "?",
            f"{job.get('stand_ins', '?')}",
            f"{job.get('exchanged', '?')}",
            round_size(int(saved)) if _is_number(saved) else "?",
        )
    return [table]


def _plans(stats: Mapping[str, Any]) -> list[RenderableType]:
    """For each trainer with a plan, a line and a bar: how far it has come, and for how long it need not wait."""
    plans = stats.get("plans")
    parts: list[RenderableType] = []
    for plan in plans if isinstance(plans, list) else ():
        plan = plan if isinstance(plan, dict) else {}
        taken, length = plan.get("taken"), plan.get("length")
        ready_s, late_share = plan.get("ready_s"), plan.get("late_share")
        if not (_is_number(taken) and _is_number(length) and length > 0):
            continue
        line = f"{plan.get('list', '?')}, epoch {plan.get('epoch', '?')}: {taken} of {length}"
        line += f", {ready_s:.1f} s ready ahead" if _is_number(ready_s) else ""
        line += f", {late_share:.1%} late" if _is_number(late_share) else ""
        followed = plan.get("believed", True)
        parts.append(Text(line if followed else f"{line}; not followed, so the mount ignores it"))
        parts.append(_bar(taken, length, "bar.complete" if followed else "dim"))
    return parts


def _bar(done: float, total: float, style: str = "bar.complete") -> RenderableType:
    bar = ProgressBar(total=total, completed=min(done, total), width=60, complete_style=style)
    # A bar alone does not end its line; the padding does.
    return Padding(bar, expand=False)


def _table(stats: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = stats.get(key)
    return table if isinstance(table, dict) else {}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _uptime(seconds: object) -> str:
    return str(timedelta(seconds=int(seconds))) if isinstance(seconds, int | float) else "?"
