"""Paths and globs as a person writes them: `train/cat`, `train/*/0*.png`, `**/*.jpg`.

`*`, `?` and `[...]` match within one name (fnmatch(3)), `**` any number of names. A pattern that names a directory
means everything below it. Every byte counts, blanks at the ends too. Names may contain what globs are made of: who
knows which names there are takes a pattern for the path that it spells, if there is such a name, before it takes it for
a glob.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase


class Pattern:
    """`text` is relative to the mount's root, or begins with the mount point."""

    def __init__(self, text: bytes, mountpoint: bytes) -> None:
        path = text
        if path == mountpoint or path.startswith(mountpoint.rstrip(b"/") + b"/"):
            path = path[len(mountpoint) :]
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        self.path = b"/".join(parts)
        """What it spells."""
        self.is_glob = any(character in self.path for character in (b"*", b"?", b"["))
        # surrogateescape keeps every byte, and fnmatch takes strings
        self._parts = [part.decode(errors="surrogateescape") for part in parts]

    def matches(self, path: bytes) -> bool:
        """Whether the pattern, as a glob, means this file, itself or by one of its directories."""
        return any(len(self._parts) in places for places in self._places(path))

    def may_match_below(self, directory: bytes) -> bool:
        """Whether any file below this directory could match; False prunes a walk."""
        *_, places = self._places(directory)
        return bool(places) or self.matches(directory)

    def _places(self, path: bytes) -> Iterator[set[int]]:
        """After none, one, two... names of the path: up to which of its parts the pattern may have been followed."""
        places = self._passed({0})
        yield places
        for name in path.decode(errors="surrogateescape").split("/") if path else ():
            places = self._passed(
                place if self._parts[place] == "**" else place + 1
                for place in places
                if place < len(self._parts) and (self._parts[place] == "**" or fnmatchcase(name, self._parts[place]))
            )
            yield places

    def _passed(self, places: Iterable[int]) -> set[int]:
        """With those that are reached because `**` may stand for no name at all."""
        found = set()
        for place in places:
            found.add(place)
            while place < len(self._parts) and self._parts[place] == "**":
                place += 1
                found.add(place)
        return found


class Selection:
    """What the lines of one request mean together: some paths, with all below them, and some globs."""

    def __init__(self, paths: Iterable[bytes], globs: Sequence[Pattern]) -> None:
        self._paths = frozenset(paths)
        self._on_the_way = frozenset(above for path in self._paths for above in _with_directories(path))
        self._globs = globs

    def __contains__(self, path: bytes) -> bool:
        return any(part in self._paths for part in _with_directories(path)) or any(
            glob.matches(path) for glob in self._globs
        )

    def may_have_below(self, directory: bytes) -> bool:
        """Whether any file below this directory could be meant; False prunes a walk."""
        return (
            directory in self._on_the_way
            or directory in self
            or any(glob.may_match_below(directory) for glob in self._globs)
        )


def _with_directories(path: bytes) -> Iterator[bytes]:
    """A path and all directories in which it lies, the root (an empty path) included."""
    yield path
    while path:
        path = path.rpartition(b"/")[0]
        yield path
