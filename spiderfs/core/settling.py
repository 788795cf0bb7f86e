"""When a version that was seen at the source can be believed for good.

A file's mtime says that a change has begun, not that it is over: write(2) sets it before the first byte arrives, and a
clock with whole seconds gives two changes one mtime. So the bytes of a version that has just come about may still
change without a sign. Until it has **settled** a version is **provisional**: what is read of it is for one open, and
kept nowhere. The same holds for the listing of a directory.

A version has settled when its mtime is older than the window by the source's clock; or, as nobody knows that clock,
when it was seen for the first time longer ago than the window by our own. The second needs no clock of anybody else's:
a server that is ahead, or an mtime in the year 2400, costs one window and no more. A server whose clock is behind makes
young versions look old. That shows when a change that was seen between two looks carries an mtime from before the
first; what is known of it so far is `behind_s`.

What this does not catch: a writer through mmap, whose stores leave the mtime alone until the kernel has written the
page back (30 seconds and more, `dirty_expire_centisecs`); one write(2) that takes longer than the window; and a change
after which somebody sets the old mtime again.

All times are seconds since the epoch.
"""

from __future__ import annotations

# Clocks with whole seconds (ext3, some servers), or with two of them (FAT).
WINDOW_S = 2.0
# One write(2) brings up to 2 GiB, and the kernel holds it up while the disk is behind.
_WRITTEN_BYTES_PER_S = 50e6
_LONGEST_WRITE_BYTES = 2 << 30
# No clock is further behind; an mtime that is was set by hand (`cp -p`, `rsync -t`).
MOST_BEHIND_S = 86400.0


def window_s(size: int) -> float:
    """How long a change of a file of this size may go on after its mtime was set."""
    return WINDOW_S + min(size, _LONGEST_WRITE_BYTES) / _WRITTEN_BYTES_PER_S


def settles_at(
    mtime_ns: int, size: int, asked_at: float, answered_at: float, behind_s: float, known: float | None
) -> float:
    """When a version has settled, or 0 if it had when the source was asked for it.

    `known` is what this function returned when the same version was seen before.
    """
    window = window_s(size)
    # A time further away than the window is not believed: our clock was set back since.
    if known is not None and known <= answered_at + window:
        return known
    if mtime_ns / 1e9 <= asked_at - behind_s - window:
        return 0.0
    return answered_at + window


def may_look_old(mtime_ns: int, size: int, asked_at: float) -> bool:
    """Whether it matters by how much the source's clock is behind."""
    age_s = asked_at - mtime_ns / 1e9
    return window_s(size) <= age_s <= window_s(size) + MOST_BEHIND_S


def behind_s(seen_at: float, mtime_ns: int, answered_at: float) -> float:
    """An upper bound of how far the source's clock is behind; the change with this mtime was made after `seen_at`."""
    mtime_s = mtime_ns / 1e9
    return answered_at - mtime_s if seen_at - mtime_s > WINDOW_S and answered_at - mtime_s <= MOST_BEHIND_S else 0.0
