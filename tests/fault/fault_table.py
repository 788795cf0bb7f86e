"""The table of faults: what may go wrong at the same time, and what readers may then see.

`fault_cells.py` makes the faults of each cell happen on a mount, and compares what readers see with this table.
The page of faults shows `as_markdown()`; a test compares the two. A call is one system call of a reader: stat, open,
read, or a listing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import choices

VICTIMS = ("supervisor", "worker", "manager", "reading process", "trainer")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
SOURCES = ("well", "slow", "hanging", "erring", "gone")
TRAINERS = ("no trainer", "hook", "plan")
_KINDS = (VICTIMS, SIGNALS, SOURCES, TRAINERS)

# The options that bring the source into each state, and the errors that a read of an uncached file may then return.
SETTINGS = {
    "well": {},
    "slow": {"source.latency_ms": 150, "source.bandwidth": "8MB"},
    "hanging": {"source.hang": "on"},
    "erring": {"source.error_rate": 0.5},
    "gone": {"source.gone": "on"},
}
_ERRORS = {
    "well": frozenset(),
    "slow": frozenset(),
    "hanging": frozenset({"ETIMEDOUT", "EIO"}),
    "erring": frozenset({"EIO"}),
    "gone": frozenset({"EIO"}),
}
# UNMOUNTED means that the reader sees the directory below the mount point.
_ENDED = frozenset({"ENOTCONN", "ECONNABORTED"})
_UNMOUNTED = _ENDED | {"UNMOUNTED"}


class Cell(NamedTuple):
    victim: str
    signal: str
    source: str
    trainer: str

    def __str__(self) -> str:
        return f"{self.victim}, {self.signal}, source {self.source}, {self.trainer}"


def all_cells() -> list[Cell]:
    return [Cell(*values) for values in itertools.product(*_KINDS)]


@dataclass(frozen=True)
class Seen:
    """What readers may see in a cell: only these errors, and no call that takes longer than the limit.

    The limit is `timeouts` times source.timeout_s and, if `stop`, the time for which the victim is stopped; a busy
    machine may add to it. `ends` says that the fault ends the mount.
    """

    errors: frozenset[str]
    timeouts: int
    stop: bool = False
    ends: bool = False

    def limit_s(self, timeout_s: float, stop_s: float) -> float:
        return self.timeouts * timeout_s + (stop_s if self.stop else 0.0)

    def in_words(self) -> str:
        what = ", ".join(sorted(self.errors)) or ("bytes" if self.stop else "nothing")
        waits = [f"{self.timeouts} T"] if self.timeouts else []
        waits += ["the stop"] if self.stop else []
        return what + (f" within {' + '.join(waits)}" if waits else "")


def seen(victim: str, signal: str, source: str) -> Seen:
    """What readers may see, which does not depend on what a trainer does."""
    errors = _ERRORS[source]
    # A call is up to two requests of the kernel, a look-up and another one, and each may wait for the source.
    waits = 2 if source == "hanging" else 0
    if victim == "supervisor" and signal == "SIGKILL":
        return Seen(errors | _ENDED, waits, ends=True)
    if victim == "supervisor" and signal == "SIGTERM":
        return Seen(errors | _UNMOUNTED, waits, ends=True)
    if victim == "worker" and signal == "SIGSTOP":
        # Other workers wait in vain for the files that the stopped worker was fetching.
        return Seen(errors | {"ETIMEDOUT"}, max(waits, 1), stop=True)
    if victim == "reading process" and signal == "SIGSTOP":
        return Seen(errors | _ERRORS["hanging"], 2)
    if victim in ("worker", "reading process"):
        # The next worker begins again with the requests of the worker that died.
        return Seen(errors, waits + 1 if waits else 0)
    return Seen(errors, waits)


def as_markdown() -> str:
    """The table of the page of faults: rows of victims and signals, columns of sources, equal ones joined."""

    def cells(victim: str, signal: str) -> tuple[str, ...]:
        return tuple(seen(victim, signal, source).in_words() for source in SOURCES)

    by_row: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for victim, signal in itertools.product(VICTIMS, SIGNALS):
        by_row.setdefault(cells(victim, signal), {}).setdefault(victim, []).append(signal)
    by_column: dict[tuple[str, ...], list[str]] = {}
    for source, column in zip(SOURCES, zip(*by_row, strict=True), strict=True):
        by_column.setdefault(column, []).append(source)
    heads = [f"source {' or '.join(sources)}" for sources in by_column.values()]
    lines = [f"| killed or stopped | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for victims, row in zip(by_row.values(), zip(*by_column, strict=True), strict=True):
        names = [
            f"{victim}, {'any signal' if signals == [*SIGNALS] else ' or '.join(signals)}"
            for victim, signals in victims.items()
        ]
        lines.append(f"| {'; '.join(names)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def covering() -> list[Cell]:
    """A few cells in which each pair of values of different kinds occurs."""
    return [Cell(*values) for values in choices.covering(_KINDS, 2)]
