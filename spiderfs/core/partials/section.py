"""The section of partly augmented samples: what loaders keep half way in a mount's cache, and how much there may be.

A **partial sample** is an immutable version like any other record: its inode follows from the sample's version, the
transforms that made it, the seed and its generation. It is no candidate of the policy. A loader says which earlier
generation a new one replaces; whatever else leaves, leaves in the order in which it came, so that what trainings have
left behind goes first.

A loader asks for room when it begins, and is told what the section has beyond the rooms of others. It then keeps a
fixed part of its samples that fits (`trainer_hook/refurbishing/generations.py`); so a section with several loaders
evicts nothing that one of them will use.

Invariant, after every call: bytes == sum of the members' sizes <= limit_bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

PARTIALS = "partials"
# The section's room is taken from the policy in so many steps, so that not every sample changes the policy's room.
_STEPS = 64


class Partials:
    """The members of the section, by inode; `share` is how much of the capacity they may take."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._sizes: dict[int, int] = {}
        self._rooms: dict[str, int] = {}
        self.bytes = 0
        self.limit_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, inode: int) -> bool:
        return inode in self._sizes

    @property
    def set_aside_bytes(self) -> int:
        """Bytes of the capacity that nothing else may take: what the section holds, rounded up to a step."""
        step = max(1, self.limit_bytes // _STEPS)
        return min(self.limit_bytes, -(-self.bytes // step) * step)

    # -- rooms

    def begin(self, store: str, wanted_bytes: int) -> int:
        """A loader begins; returns the bytes that it may fill: what it wants, or what is left.

        `store` names what it keeps: processes that give the same name share one room.
        """
        taken = sum(room for other, room in self._rooms.items() if other != store)
        room = self._rooms[store] = max(0, min(wanted_bytes, self.limit_bytes - taken))
        return room

    def end(self, store: str) -> None:
        """The last process of this name has gone; what it kept stays until others need the room."""
        self._rooms.pop(store, None)

    # -- members

    def restore(self, members: Iterable[tuple[int, int]]) -> None:
        """Replace all members by these (inode, bytes), the oldest first; `resize` then drops what is too much."""
        self._sizes = dict(members)
        self.bytes = sum(self._sizes.values())

    def resize(self, capacity_bytes: int) -> list[int]:
        """Follow a new capacity; returns the members that have to leave for it."""
        self.limit_bytes = int(capacity_bytes * self._share)
        return self._leave(self.bytes - self.limit_bytes)

    def made(self, inode: int, size: int, replaces: int | None) -> list[int] | None:
        """A sample is to become a member; returns the members that leave for it, or None if it does not fit."""
        if inode in self._sizes:
            return []
        if size > self.limit_bytes:
            return None
        gone = [] if replaces is None or replaces not in self._sizes else [replaces]
        self.forget(gone)
        gone += self._leave(self.bytes + size - self.limit_bytes)
        self._sizes[inode] = size
        self.bytes += size
        return gone

    def forget(self, inodes: Iterable[int]) -> None:
        """These have left, or the store has lost them; others are ignored."""
        for inode in inodes:
            self.bytes -= self._sizes.pop(inode, 0)

    def _leave(self, over_bytes: int) -> list[int]:
        """The oldest members that together free so many bytes, taken out."""
        going = []
        for inode, size in self._sizes.items():
            if over_bytes <= 0:
                break
            going.append(inode)
            over_bytes -= size
        self.forget(going)
        return going
