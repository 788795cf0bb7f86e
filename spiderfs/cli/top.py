"""`spiderfs top`: the activity of mounts, every second; of one mount also its training runs and peers.

A page fits 80 columns and 24 lines, and leaves out what is zero. Rates are those of the last few seconds, and each of
their bars is the mean of some seconds; both are differences of `stats.json`, so they begin when the command does.

Each mount is asked by a thread of its own, which may wait for a mount that hangs. The main thread alone draws, reads
keys and knows what was answered.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import click
from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spiderfs.cli import figures
from spiderfs.cli.control_files import every_place, explained, find_mount, place_of, printable, read_stats
from spiderfs.cli.control_files import mountpoints as complete
from spiderfs.cli.figures import rate
from spiderfs.errors import MountError
from spiderfs.linux.mounts import Mount
from spiderfs.linux.process_table import ended_by_signals
from spiderfs.options.units import round_size

_INTERVAL_S = 1.0
# How soon to look for the first answer of a mount.
_SOON_S = 0.1
# Rates are of so many looks, and a bar of a sparkline too; so many bars are drawn: three minutes.
_SMOOTHED, _BARS = 5, 36
# What is shown of the name of a mount point, or of a peer: its end.
_NAME = 28
# Peers that are shown beside the rest; the view of the status has more.
_FEW_PEERS = 3
# What a page of rows leaves of a terminal's lines for its own head, and for the line of keys.
_OTHER_LINES = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
# What keys send that are no letters, such as arrows.
_ESCAPED = re.compile(r"\x1b(\[[\d;]*[@-~]|O.)?")


@click.command()
@click.argument("mountpoints", metavar="[MOUNTPOINT]...", nargs=-1, shell_complete=complete)
@click.option("--all", "everything", is_flag=True, help="Show metrics that are zero too.")
def top(mountpoints: tuple[str, ...], everything: bool) -> None:
    """Show the activity of the mounts at MOUNTPOINT, or of all, every second until q or Ctrl-C.

    One mount is shown with its training runs and their plans, several with a line each. Keys: v shows other views of a
    mount (its whole status, its metrics), the space bar the next page, n the next mount, q quits.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        # No one would see to it that it ends when its reader has gone.
        raise click.UsageError("top draws on a terminal: use 'spiderfs status', or 'spiderfs status --json'")
    chosen = {place_of(mount): mount for mount in map(find_mount, mountpoints)}
    if not chosen and not every_place():
        raise MountError("there is no spiderfs mount: 'spiderfs mount SOURCE MOUNTPOINT' makes one")
    meters: dict[str, Meter] = {}
    answers: SimpleQueue[tuple[Meter, dict[str, Any] | OSError, float]] = SimpleQueue()
    look = Look()
    # However it ends, the terminal is as it was.
    with (
        ended_by_signals(),
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(auto_refresh=False, screen=True) as live,
    ):
        while True:
            there = chosen or every_place()
            for point in meters.keys() - there.keys():
                meters.pop(point).gone = True
            for point in there.keys() - meters.keys():
                meters[point] = Meter(there[point])
                threading.Thread(target=_ask, args=(meters[point], answers.put), daemon=True).start()
            with suppress(Empty):
                while True:
                    meter, answer, at = answers.get_nowait()
                    meter.update(answer, at)
            shown = [meters[point] for point in there]
            drawn = Layout()
            drawn.split_column(
                Layout(page(shown, look, everything, live.console.height)), Layout(look.line(shown), size=1)
            )
            live.update(drawn, refresh=True)
            asked = any(not (meter.stats or meter.trouble) for meter in shown)
            for key in pressed(_SOON_S if asked else _INTERVAL_S):
                if key == "q":
                    return
                look.press(key, shown)


def _ask(meter: Meter, report: Callable[[tuple[Meter, dict[str, Any] | OSError, float]], None]) -> None:
    """Read a mount's statistics every second, and report them; in a thread."""
    while not meter.gone:
        answer: dict[str, Any] | OSError
        try:
            answer = read_stats(meter.mount)
        except OSError as exc:
            answer = exc
        report((meter, answer, time.monotonic()))
        time.sleep(_INTERVAL_S)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for keys, so many seconds at most; without a terminal, for none."""
    if sys.stdin is None or not sys.stdin.isatty():

        def deaf(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield deaf
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        if not select.select([terminal], [], [], seconds)[0]:
            return ""
        try:
            keys = os.read(terminal, 64).decode(errors="replace")
        except OSError:
            keys = ""
        # Nothing to read: the terminal has gone.
        return _ESCAPED.sub("", keys) if keys else "q"

    tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)


VIEWS = ("overview", "status", "metrics")


@dataclass
class Look:
    """What the person at the terminal looks at: a mount, or 0 for the list of them, and a view and page of it."""

    mount: int = 0
    view: int = 0
    page: int = 0

    def press(self, key: str, meters: Sequence[Meter]) -> None:
        if key == "v" and self.of(meters) is not None:
            self.view, self.page = (self.view + 1) % len(VIEWS), 0
        elif key == " ":
            self.page += 1
        elif key == "n" and len(meters) > 1:
            self.mount, self.page = (self.mount + 1) % (len(meters) + 1), 0

    def of(self, meters: Sequence[Meter]) -> Meter | None:
        """The mount that is looked at; None for the list of all."""
        if len(meters) == 1:
            return meters[0]
        return meters[self.mount - 1] if 0 < self.mount <= len(meters) else None

    def line(self, meters: Sequence[Meter]) -> Text:
        """What keys do."""
        parts = ["q quit"]
        if (meter := self.of(meters)) is not None:
            parts.append(f"v view ({VIEWS[self.view]})")
        if self.view and meter is not None:
            parts.append("space more")
        if len(meters) > 1:
            which = "list" if meter is None else f"{self.mount} of {len(meters)}"
            parts.append(f"n next mount ({which})")
        return Text("   ".join(parts), style="reverse", no_wrap=True, overflow="ellipsis")


class Change(NamedTuple):
    """What has happened between two looks, or a sum of it."""

    seconds: float = 0.0
    opens: float = 0.0
    hits: float = 0.0
    waited_s: float = 0.0
    source_bytes: float = 0.0

    @classmethod
    def between(cls, before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> Change:
        def more(name: str) -> float:
            return max(0.0, now.get(name, 0) - before.get(name, 0))  # less after a new mount

        unseen = more("page_cache_reads")
        hits, waited_s = more("opens_hit") + unseen, more("stall_microseconds") / 1e6
        return cls(seconds, more("opens") + unseen, hits, waited_s, more("origin_bytes"))

    @classmethod
    def together(cls, changes: Iterable[Change]) -> Change:
        return cls(*map(sum, zip(*changes, strict=True))) if changes else cls()

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.opens if self.opens else None

    def per_s(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0


class Meter:
    """One mount, its stats as they were last, and what has changed since."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self.stats: Mapping[str, Any] = {}
        self.trouble = ""
        self.gone = False
        """Whether no one is to ask it any more."""
        self._at = 0.0
        self._changes: deque[Change] = deque(maxlen=_SMOOTHED * _BARS)

    def update(self, stats: Mapping[str, Any] | OSError, at: float) -> None:
        """Take what the mount has answered at this time, in seconds, or why it has not."""
        if isinstance(stats, OSError):
            self.trouble = str(explained(self.mount, stats))
            return
        self.trouble = ""
        if self.stats:
            self._changes.append(Change.between(numbers(self.stats), numbers(stats), at - self._at))
        self.stats, self._at = stats, at

    @property
    def now(self) -> Change:
        return Change.together([*self._changes][-_SMOOTHED:])

    def bars(self) -> list[Change]:
        """The last minutes, some seconds each; the oldest first."""
        changes = [*self._changes]
        first = len(changes) % _SMOOTHED
        groups = [changes[:first], *(changes[at : at + _SMOOTHED] for at in range(first, len(changes), _SMOOTHED))]
        return [Change.together(group) for group in groups if group][-_BARS:]


def page(
    meters: Sequence[Meter], look: Look | None = None, everything: bool = False, height: int = 24
) -> RenderableType:
    """What is drawn above the line of keys; a missing key of stats, or one of a newer version, does no harm."""
    look = look or Look()
    if (meter := look.of(meters)) is not None:
        return _one(meter, look, everything, max(1, height - _OTHER_LINES))
    table = Table("mount", box=None, pad_edge=False, expand=True)
    for heading in ("hit rate", "files/s", "waiting", "source/s", "cache", "jobs"):
        table.add_column(heading, justify="right", no_wrap=True)
    troubles = []
    for meter in meters:
        now, stats = meter.now, meter.stats
        if meter.trouble:
            troubles.append(Text(meter.trouble, style="red"))
            continue
        name = printable(place_of(meter.mount))
        table.add_row(
            Text(_end_of(name)),
            *(_percent(now.hit_rate), rate(now.per_s(now.opens)), rate(now.per_s(now.waited_s))),
            round_size(now.per_s(now.source_bytes)),
            _percent(next((row.share for row in figures.cache(stats)), None)),
            str(len(figures.rows(stats, "jobs"))),
        )
    return Group(table, *troubles)


def _one(meter: Meter, look: Look, everything: bool, lines: int) -> RenderableType:
    source = (meter.stats or {}).get("source", meter.mount.source)
    head = Text(printable(f"{source} on {place_of(meter.mount)}"), style="bold", no_wrap=True)
    if meter.trouble or not meter.stats:
        return Group(head, Text(meter.trouble or "no answer yet", style="red" if meter.trouble else ""))
    if VIEWS[look.view] == "metrics":
        return Group(head, "", _metrics(meter.stats, look, everything, lines))
    if VIEWS[look.view] == "status":
        shown = figures.all_rows(meter.stats)
        first = lines * (look.page % max(1, -(-len(shown) // lines)))
        rest = [Text(printable(row), no_wrap=True, overflow="ellipsis") for row in shown[first : first + lines]]
        return Group(head, "", *rest)
    return Group(head, *_overview(meter))


def _overview(meter: Meter) -> list[RenderableType]:
    stats, now, bars = meter.stats, meter.now, meter.bars()
    rates = Table.grid(padding=(0, 2))
    rates.add_column()
    rates.add_column(justify="right", min_width=10)
    rate_of: tuple[tuple[str, Callable[[Change], float | None], Callable[[float], str], float], ...] = (
        ("hit rate", lambda change: change.hit_rate, _percent, 1.0),
        ("files/s", lambda change: change.per_s(change.opens), rate, 0.0),
        ("readers waiting", lambda change: change.per_s(change.waited_s), rate, 0.0),
        ("source/s", lambda change: change.per_s(change.source_bytes), round_size, 0.0),
    )
    for name, of, shown, most in rate_of:
        value, amounts = of(now), [of(bar) or 0.0 for bar in bars]
        most = most or max(amounts, default=0.0)
        # What is shown as 0 has no bar.
        drawn = sparkline([amount if shown(amount) != shown(0.0) else 0.0 for amount in amounts], most)
        rates.add_row(
            name, "-" if value is None else shown(value), drawn, f"max {shown(most)}" if drawn.strip() else ""
        )
    parts: list[RenderableType] = [Text(f"policy {figures.about(stats)}"), "", rates]
    nodes = list(figures.peers(stats, _FEW_PEERS)) if figures.table(stats, "peers") else []
    trainings = [*figures.jobs(stats), *figures.plans(stats), *(row for row in figures.remarks(stats) if row.bad)]
    for rows in ([*figures.cache(stats), *figures.opens(stats), *figures.ahead(stats)], nodes, trainings):
        parts += ["", _grid(rows)] if rows else []
    return parts


def _grid(rows: Iterable[figures.Row]) -> Table:
    """Rows below one another, a bar below each that has a share; what does not fit goes on below."""
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        style = "red" if row.bad else ""
        grid.add_row(Text(_end_of(row.name), style), Text(printable(row.text), style))
        if row.share is not None:
            bar_style = "dim" if row.bad else "bar.complete"
            grid.add_row("", ProgressBar(total=1.0, completed=min(row.share, 1.0), width=50, complete_style=bar_style))
    return grid


def _end_of(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def _metrics(stats: Mapping[str, Any], look: Look, everything: bool, lines: int) -> RenderableType:
    """The metrics in two columns, as many as have room; behind the last page comes the first."""
    found = [
        (name, f"{value:,.4f}".rstrip("0").rstrip("."))
        for name, value in sorted(numbers(stats).items())
        if value or everything
    ]
    first = 2 * lines * (look.page % max(1, -(-len(found) // (2 * lines))))
    found = found[first : first + 2 * lines]
    half = (len(found) + 1) // 2
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify="right" if justify == "right" else "left")
    for left, right in zip(found[:half], [*found[half:], ("", "")][:half], strict=True):
        table.add_row(*left, *right)
    return table


def sparkline(values: Sequence[float], most: float = 0.0) -> str:
    """A bar for each value, between 0 and the largest one, or `most`; a space where it is 0."""
    most = most or max(values, default=0.0)
    return "".join(_BLOCKS[min(7, int(8 * value / most))] if value > 0 else " " for value in values)


def numbers(stats: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: value for name, value in figures.table(stats, "metrics").items() if figures.is_number(value)}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
