"""When a version has settled: when its bytes no longer change under it.

The mtime of a file says that a change has begun, not that it is over: write(2) sets the mtime before the first byte
arrives, and a clock that counts whole seconds gives two changes the same mtime. So the bytes of a young version may
still change without a sign. Until a version has **settled** it is **provisional**: bytes that are read of it serve one
open, and are stored nowhere. The same holds for the listing of a directory.

A version has settled when its mtime is older than a time window, by the source's clock. The source's clock is not
known, so a version has also settled when our own clock says that we saw it first longer than a window ago. That second
rule needs no other clock: if the server's clock is ahead, or an mtime lies in the year 2400, it costs one window and no
more. If the server's clock is behind, young versions look old. We find that out when a file changes between two of our
looks at it, and the new mtime lies before the first look; `behind_s` is the most that we have found so far.

Three kinds of change escape this. A writer through mmap leaves the mtime alone until the kernel has written the page
back (30 seconds and more, `dirty_expire_centisecs`). A single write(2) may take longer than the window. And someone
may set the old mtime again after a change.

All times are in seconds since 1970 (time(2)).
"""

from __future__ import annotations

# Some file systems count time in whole seconds (ext3, some servers), or in steps of two seconds (FAT).
WINDOW_S = 2.0
# One write(2) writes up to 2 GiB (write(2)), and the kernel makes it wait while the disk is slow.
_WRITTEN_BYTES_PER_S = 50e6
_LONGEST_WRITE_BYTES = 2 << 30
# We take it that no clock is further behind; a still older mtime was set by a program (`cp -p`, `rsync -t`).
MOST_BEHIND_S = 86400.0


def window_s(size: int) -> float:
    """How long a change of a file of this size may go on after its mtime was set."""
    return WINDOW_S + min(size, _LONGEST_WRITE_BYTES) / _WRITTEN_BYTES_PER_S


def settles_at(
    mtime_ns: int, size: int, asked_at: float, answered_at: float, behind_s: float, known: float | None
) -> float:
    """The time at which a version has settled, or 0 if it had settled when we asked the source for it.

    `size` is in bytes; `asked_at` and `answered_at` are when we asked and when the source answered. `known` is what
    this function returned when we saw the same version before.
    """
    window = window_s(size)
    # A time that lies more than a window ahead is not trusted: our clock has been set back since.
    if known is not None and known <= answered_at + window:
        return known
    if mtime_ns / 1e9 <= asked_at - behind_s - window:
        return 0.0
    return answered_at + window


def may_look_old(mtime_ns: int, size: int, asked_at: float) -> bool:
    """Whether a version of this age could be a young one from a clock that is behind."""
    age_s = asked_at - mtime_ns / 1e9
    return window_s(size) <= age_s <= window_s(size) + MOST_BEHIND_S


def behind_s(seen_at: float, mtime_ns: int, answered_at: float) -> float:
    """An upper bound on how far the source's clock is behind, from a change that was made after `seen_at`."""
    mtime_s = mtime_ns / 1e9
    return answered_at - mtime_s if seen_at - mtime_s > WINDOW_S and answered_at - mtime_s <= MOST_BEHIND_S else 0.0
