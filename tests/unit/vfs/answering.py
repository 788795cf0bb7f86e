"""A manager that answers control files."""

from __future__ import annotations

from collections.abc import Callable


class Manager:
    """The other end of the channel."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, bytes]] = []
        self.refuses: Exception | None = None
        self.renders = 0
        self.more: list[bytes] = []

    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        self.renders += 1
        take(f"{name} {self.renders}\n".encode())
        for piece in self.more:
            take(piece)
        if self.refuses:
            raise self.refuses

    async def apply(self, name: str, text: bytes) -> None:
        if self.refuses:
            raise self.refuses
        self.applied.append((name, text))
