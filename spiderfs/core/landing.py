"""How much of a cache is left free for landing while nothing is known of the files that come."""

from __future__ import annotations

# Landing holds fetched files until the manager has decided about them, some 10 ms. It gets 5 % of a small cache, and at
# most 64 MiB of a large one: 600 files of 112 kB, a fifth of a second at full speed.
LANDING_SHARE = 0.05
LANDING_MAX_BYTES = 64 << 20
# Landing has room for so many of the largest files. With room for one alone, each such file would push out all others.
LANDING_FILES = 4


def landing_room(capacity_bytes: int, share: float = LANDING_SHARE) -> int:
    """The bytes that are left free of a cache of so many."""
    return min(int(capacity_bytes * share), LANDING_MAX_BYTES)


def landing_of(share_bytes: int, largest_bytes: int, capacity_bytes: int) -> int:
    """The bytes that are left free if so many are wanted, and the largest file has so many."""
    return min(max(share_bytes, LANDING_FILES * largest_bytes), capacity_bytes // 2)
