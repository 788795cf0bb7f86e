"""Paths and globs as a person writes them: `train/cat`, `train/*/0*.png`, `**/*.jpg`.

`*`, `?` and `[...]` match within one name (fnmatch(3)), and `**` matches any number of names. A pattern that matches a
directory means all files below it. Every byte counts, and so do blanks at the ends. A name may contain the characters
of globs. So a caller that knows the names of the source first takes a pattern as a path, and only if there is no such
name as a glob. As in a shell, where a glob's first character does not match a dot, a glob means files below
`.spiderfs/views` only if it begins with that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from spiderfs.errors import ConfigError
from spiderfs.vfs.control_files import CONTROL_DIRECTORY
from spiderfs.views.recipe import ORIGINAL
from spiderfs.views.tree import VIEWS_DIRECTORY

_CONTROL_NAME = os.fsdecode(CONTROL_DIRECTORY)


class Pattern:
    """`text` is relative to the mount's root, or begins with the mount point; raises ConfigError for any other path.

    `linked` is the name in `.spiderfs/views` that is a link to the root: the files below it are those of the root.
    """

    def __init__(self, text: bytes, mountpoint: bytes, linked: str = ORIGINAL) -> None:
        path = text
        if path == mountpoint or path.startswith(mountpoint.rstrip(b"/") + b"/"):
            path = path[len(mountpoint) :]
        elif path.startswith(b"/") and path.strip(b"/"):
            here = f"{os.fsdecode(text)} lies outside of the mount at {os.fsdecode(mountpoint)}"
            raise ConfigError(f"{here}: write paths below it, or relative to it")
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        root = [*VIEWS_DIRECTORY.split(b"/"), os.fsencode(linked)]
        if parts[: len(root)] == root:
            parts = parts[len(root) :]
        self.path = b"/".join(parts)
        """The path that the text is, taken as a path."""
        self.is_glob = any(character in self.path for character in (b"*", b"?", b"["))
        # fnmatch takes strings, and surrogateescape keeps every byte.
        self._parts = [part.decode(errors="surrogateescape") for part in parts]

    @property
    def means_views(self) -> bool:
        """Whether the pattern means files below the directory of views, and none beside it."""
        return self._parts[:1] == [_CONTROL_NAME]

    def matches(self, path: bytes) -> bool:
        """Whether the pattern, taken as a glob, matches this file or one of the directories above it."""
        if path.startswith(VIEWS_DIRECTORY) and not self.means_views:
            return False
        return any(len(self._parts) in followed for followed in self._followed(path))

    def may_match_below(self, directory: bytes) -> bool:
        """Whether any file below this directory could match; False prunes a walk."""
        if directory.startswith(VIEWS_DIRECTORY) and not self.means_views:
            return False
        *_, followed = self._followed(directory)
        return bool(followed) or self.matches(directory)

    def _followed(self, path: bytes) -> Iterator[set[int]]:
        """After none, one, two... names of the path: how many parts of the pattern they may have matched."""
        followed = self._with_empty({0})
        yield followed
        for name in path.decode(errors="surrogateescape").split("/") if path else ():
            followed = self._with_empty(
                count if self._parts[count] == "**" else count + 1
                for count in followed
                if count < len(self._parts) and (self._parts[count] == "**" or fnmatchcase(name, self._parts[count]))
            )
            yield followed

    def _with_empty(self, counts: Iterable[int]) -> set[int]:
        """These counts, and those that follow because `**` may match no name at all."""
        found = set()
        for count in counts:
            found.add(count)
            while count < len(self._parts) and self._parts[count] == "**":
                count += 1
                found.add(count)
        return found


class Selection:
    """All files that the lines of one request mean: those at and below some paths, and those that match some globs."""

    def __init__(self, paths: Iterable[bytes], globs: Sequence[Pattern]) -> None:
        self._paths = frozenset(paths)
        self._on_the_way = frozenset(above for path in self._paths for above in _with_directories(path))
        self._globs = globs

    def __contains__(self, path: bytes) -> bool:
        return any(part in self._paths for part in _with_directories(path)) or any(
            glob.matches(path) for glob in self._globs
        )

    def may_have_below(self, directory: bytes) -> bool:
        """Whether the request may mean a file below this directory; False prunes a walk."""
        return (
            directory in self._on_the_way
            or directory in self
            or any(glob.may_match_below(directory) for glob in self._globs)
        )


def _with_directories(path: bytes) -> Iterator[bytes]:
    """A path and all directories above it, with the root (an empty path) as the last.

    The root does not stand for what lies below the directory of views: these are its files in other forms.
    """
    yield path
    while path and path != CONTROL_DIRECTORY:
        path = path.rpartition(b"/")[0]
        yield path
