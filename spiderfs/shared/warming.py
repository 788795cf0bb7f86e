"""The progress of a warm request, one line of `.spiderfs/warm`: the manager writes it, `spiderfs warm` reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spiderfs.shared.escapes import escaped

_LINE = re.compile(
    r"(?P<state>working|idle|ended): (?P<found>\d+) files found(?P<searching> so far)?, (?P<fetched>\d+) fetched"
    r" \((?P<fetched_bytes>\d+) bytes\), (?P<present>\d+) cached before, (?P<failed>\d+) failed, (?P<missing>\d+)"
    r" missing, (?P<roomless>\d+) without room, (?P<unkept>\d+) not kept, (?P<left>\d+) left \((?P<left_bytes>\d+)"
    r" bytes\)"
    r"(?:; the mount has no file (?P<unknown>.*))?\n?"
)
_BYTES = ("fetched_bytes", "left_bytes")
_COUNTS = ("found", "fetched", "present", "failed", "missing", "roomless", "unkept", "left", *_BYTES)


@dataclass
class Warming:
    """What has become of all that was asked for since this was last seen to be at an end."""

    searching: bool = False
    """Whether more files may be found."""
    ended: bool = False
    """Whether someone has ended it before all was fetched."""
    found: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    present: int = 0
    """Files that were in the cache before."""
    failed: int = 0
    """Files and directories that could not be read."""
    missing: int = 0
    """Paths and globs that mean no file."""
    roomless: int = 0
    """Files that were to be pinned, and were left alone because pins had no room for them."""
    unkept: int = 0
    """Files that were fetched in vain, because the disk of the cache is full."""
    left: int = 0
    """Files that were found, and about which nothing is done yet, or is being done."""
    left_bytes: int = 0
    unknown: str = ""
    """The first path or glob that means no file; in a line what cannot be printed is escaped."""

    @property
    def working(self) -> bool:
        return not self.ended and (self.searching or self.left > 0)

    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}

    def line(self) -> str:
        state = "ended" if self.ended else "working" if self.working else "idle"
        unknown = f"; the mount has no file {escaped(self.unknown)}" if self.unknown else ""
        return (
            f"{state}: {self.found} files found{' so far' if self.searching else ''},"
            f" {self.fetched} fetched ({self.fetched_bytes} bytes), {self.present} cached before, {self.failed} failed,"
            f" {self.missing} missing, {self.roomless} without room, {self.unkept} not kept, {self.left} left"
            f" ({self.left_bytes} bytes){unknown}\n"
        )

    @classmethod
    def of_line(cls, line: str) -> Warming:
        """What a line says; raises ValueError for another text."""
        said = _LINE.fullmatch(line)
        if said is None:
            raise ValueError(f"this is no line of .spiderfs/warm: {line!r}")
        counts = {name: int(said[name]) for name in _COUNTS}
        return cls(bool(said["searching"]), said["state"] == "ended", **counts, unknown=said["unknown"] or "")
