"""`spiderfs report`: a page of HTML about the training runs of a mount, and the hits of other policies and capacities.

The figures of each epoch are in `.spiderfs/epochs`. Those of other policies and capacities come from a replay of the
recorded trace, as in `spiderfs simulate`. The page is one file, without scripts, fonts or pictures from a network.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from spiderfs import __version__
from spiderfs.cli.control_files import explaining, find_mount, mountpoints, printable, read_control, read_stats, warn
from spiderfs.cli.doctor import NEAR_S
from spiderfs.errors import MountError, UsageError
from spiderfs.linux.process_table import ended_by_signals
from spiderfs.options.units import counted, round_size

# Capacities that are replayed beside the mount's own.
_CAPACITIES = "10%,20%,50%"
_HITS_HERE = (
    "Hits are here the reads of samples that the cache still held. Above they are all reads that did not wait, also of"
    " samples that a plan had prefetched or, in an immutable mount, that the page cache held."
)
# A chart is drawn on so many units, and scales to the room that it has.
_WIDTH, _HEIGHT, _HEAD, _FOOT, _WIDEST = 320, 150, 22, 18, 48
_STYLE = """
:root { color-scheme: light dark; --bar: #4c7ab1; --line: #8886; }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.scroll { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, td:has(.part) { text-align: left; }
.last td { border-bottom: 2px solid var(--line); }
.part { display: inline-block; height: .7em; background: var(--bar); min-width: 1px; }
.own td:first-child { font-weight: 600; } footer { margin-top: 2.5rem; font-size: .85rem; opacity: .75; }
"""


@click.command()
@click.argument("mountpoint", shell_complete=mountpoints)
@click.option(
    "--html", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Write the page to FILE."
)
def report(mountpoint: str, path: Path) -> None:
    """Write a page about the training runs of the mount at MOUNTPOINT, finished or running.

    It shows the time, bytes, hits, waits and late samples of each epoch. If the mount records a trace (-o trace=FILE),
    the page also compares other policies and capacities. Only runs with a hook or a plan appear. Any browser shows the
    file, without a network.
    """
    from spiderfs.profiling.private_mount import settings_in

    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: name a file in a directory that is there, and may be written")
    mount = find_mount(mountpoint)
    try:
        with explaining(mount):
            stats, options = read_stats(mount), settings_in(read_control(mount, "config"))
            epochs = [json.loads(line) for line in read_control(mount, "epochs").splitlines()]
    except ValueError as exc:
        raise MountError(f"{mount.mountpoint} has a daemon of another version of spiderfs: mount it again") from exc
    trace = options.get("trace", "none")
    if not epochs and trace == "none":
        raise UsageError(
            f"{mount.mountpoint} has seen no training yet, and records no trace: call trainer_hook.plan in the"
            " training, or mount with -o trace=FILE"
        )
    with ended_by_signals():
        compared = _compared(Path(trace), stats, bool(epochs)) if trace != "none" else []
    text = _page(str(mount.mountpoint), stats, epochs, compared)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc
    click.echo(f"wrote {counted(len(epochs), 'epoch')} to {path}")


def _compared(trace: Path, stats: Mapping[str, Any], may_fail: bool) -> list[dict[str, Any]]:
    """What `spiderfs simulate` finds about the trace, and with recorded plans a second time, with these followed."""
    from rich.console import Console

    from spiderfs.simulation import chosen_capacities, chosen_policies, compare
    from spiderfs.trace import read_trace

    with Console(stderr=True).status("Replaying"):
        try:
            read = read_trace(trace)
            if not len(read.accesses()):
                raise UsageError(f"the trace {trace} is empty so far: the mount writes to it every half minute")
            capacities = chosen_capacities(f"{stats['capacity_bytes']},{_CAPACITIES}")
            found = [compare(read, trace.name, chosen_policies("all"), capacities, None)]
            if read.has_plans:
                policies = chosen_policies(str(stats["policy"]))
                found.append(compare(read, trace.name, policies, capacities, None, plans=True))
        except UsageError as exc:
            if not may_fail:
                raise
            warn(f"{exc}; so the page does not compare other options")
            return []
    return found


def _page(
    mountpoint: str, stats: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], compared: Sequence[dict[str, Any]]
) -> str:
    trainings: dict[str, list[Mapping[str, Any]]] = {}
    for epoch in epochs:
        trainings.setdefault(epoch["job"], []).append(epoch)
    latest_first = sorted(trainings.values(), key=lambda of_one: -max(epoch["ended"] for epoch in of_one))
    head = (
        f"{escape(printable(stats['source']))} with policy {escape(stats['policy'])},"
        f" {round_size(stats['used_bytes'])} of {round_size(stats['capacity_bytes'])} cached."
    )
    title = escape(printable(f"Training runs at {mountpoint}"))
    command = escape(printable(f"spiderfs report {shlex.quote(mountpoint)}"))
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1><p>{head}</p>",
        *(_training(of_one) for of_one in latest_first),
        _options(compared, stats),
        f"<footer>Written by <code>{command}</code>, version {__version__}, on"
        f" {time.strftime('%Y-%m-%d at %H:%M %Z')}.</footer>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _training(epochs: Sequence[Mapping[str, Any]]) -> str:
    total = {
        name: sum(epoch[name] for epoch in epochs)
        for name in ("seconds", "samples", "waited", "waited_s", "planned", "late", "read_bytes", "origin_bytes")
    }
    name = escape(printable(epochs[0]["name"] or epochs[0]["job"]))
    hits = 1 - total["waited"] / total["samples"]
    said = (
        f"{counted(len(epochs), 'epoch')}, {_duration(total['seconds'])} in all. Of {total['samples']:,} reads,"
        f" {hits:.1%} did not wait for the source; the others waited {_duration(total['waited_s'])} in total."
        f" {round_size(total['origin_bytes'])} came from the source for {round_size(total['read_bytes'])} read."
    )
    if total["waited"] and total["waited_s"] / total["waited"] < NEAR_S:
        said += (
            f" A read that waited took {1000 * total['waited_s'] / total['waited']:.1f} ms: without a mount, reading"
            " this source may be as fast."
        )
    if total["planned"]:
        late = total["late"] / total["planned"]
        said += f" {total['planned']:,} reads were planned, and {late:.1%} of these were late."
    else:
        said += " No plan was followed: with trainer_hook.plan, the mount prefetches each sample."

    def chart(
        of: str, value: Callable[[Mapping[str, Any]], float], shown: Callable[[float], str], most: float = 0.0
    ) -> str:
        return _chart(of, [(epoch["epoch"], value(epoch)) for epoch in epochs], shown, most)

    charts = [
        chart("time", lambda epoch: epoch["seconds"], _duration),
        chart("bytes from the source", lambda epoch: epoch["origin_bytes"], round_size),
        chart("hits", lambda epoch: 1 - epoch["waited"] / epoch["samples"], _percent, 1.0),
        chart("waits of all readers", lambda epoch: epoch["waited_s"], _duration),
    ]
    if total["planned"]:
        charts.append(chart("late, of planned reads", lambda epoch: epoch["late"] / max(1, epoch["planned"]), _percent))
    headings = ("epoch", "time", "reads", "hits", "waits", "late", "substitutes", "read", "from the source")
    rows = [
        (
            str(epoch["epoch"]),
            _duration(epoch["seconds"]),
            f"{epoch['samples']:,}",
            _percent(1 - epoch["waited"] / epoch["samples"]),
            _duration(epoch["waited_s"]),
            _percent(epoch["late"] / epoch["planned"]) if epoch["planned"] else "-",
            f"{epoch['substitutes']:,}",
            round_size(epoch["read_bytes"]),
            round_size(epoch["origin_bytes"]),
        )
        for epoch in epochs
    ]
    return (
        f'<h2>Training run {name}</h2><p>{escape(said)}</p><div class="charts">{"".join(charts)}</div>'
        f"{_table(headings, ((row, '') for row in rows))}"
    )


def _options(compared: Sequence[dict[str, Any]], stats: Mapping[str, Any]) -> str:
    from spiderfs.simulation import BOUND, caption, columns, policy_named

    parts = ["<h2>Other policies and capacities</h2>"]
    if not compared:
        return f"{parts[0]}<p>To compare them in a later report, mount with -o trace=FILE.</p>"
    for report in compared:
        as_mounted = report["plans"] or not compared[-1]["plans"]
        if compared[-1]["plans"]:
            parts.append(f"<h3>{'With' if as_mounted else 'Without'} the plans of the training run</h3>")
        parts.append(f"<p>{escape(caption(report))} {_HITS_HERE}</p>")
        rows = []
        for row in report["results"]:
            own = (as_mounted, row["policy"], row["capacity_bytes"]) == (True, stats["policy"], stats["capacity_bytes"])
            policy = f"{policy_named(row)}{', as mounted' if own else ''}"
            cells = [policy, round_size(row["capacity_bytes"]), _percent(row["hit_ratio"])]
            cells += [_percent(row["warm_hit_ratio"]), f"{row['redirects']:,}", round_size(row["origin_bytes"])]
            cells.append(f'<span class="part" style="width:{6 * row["warm_hit_ratio"]:.2f}rem"></span>')
            rows.append((cells, "own" if own else "last" if row["policy"] == BOUND else ""))
        parts.append(_table(("policy", "capacity", *columns(report)[2:5], "from the source", ""), rows))
    return "".join(parts)


def _table(headings: Iterable[str], rows: Iterable[tuple[Sequence[str], str]]) -> str:
    """A table that scrolls by itself where it is wider than the page; each row has a class. Cells are HTML."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = ""
    for cells, kind in rows:
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        body += f'<tr class="{kind}">{row}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _chart(of: str, values: Sequence[tuple[int, float]], shown: Callable[[float], str], top: float) -> str:
    """Bars of one figure by epoch, with the largest value; they end at `top`, or at that value. Zeros need no chart."""
    if not (most := max(value for _, value in values)):
        return ""
    top = top or most
    room, step = _HEIGHT - _HEAD - _FOOT, _WIDTH / len(values)
    wide = min(_WIDEST, max(0.5, 0.85 * step))
    bars = []
    for place, (epoch, value) in enumerate(values):
        high = room * value / top
        bars.append(
            f'<rect x="{place * step:.1f}" y="{_HEIGHT - _FOOT - high:.1f}" width="{wide:.1f}"'
            f' height="{high:.1f}" fill="var(--bar)"><title>epoch {epoch}: {shown(value)}</title></rect>'
        )
    first, last = values[0][0], values[-1][0]
    ends = f'<text x="0" y="{_HEIGHT - 4}">epoch {first}</text>'
    if len(values) > 1:
        ends += f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">{last}</text>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{of} by epoch">'
        f'<text x="0" y="13">{of}, largest: {shown(most)}</text>{"".join(bars)}'
        f'<line x1="0" x2="{_WIDTH}" y1="{_HEIGHT - _FOOT}" y2="{_HEIGHT - _FOOT}" stroke="var(--line)"/>{ends}</svg>'
    )


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _duration(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
