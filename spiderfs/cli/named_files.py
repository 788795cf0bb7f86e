"""The paths that `warm`, `pin`, `unpin` and `evict` are given, as the daemon takes them: relative to the mount."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from glob import iglob
from typing import NamedTuple

from spiderfs.cli.control_files import ANSWER_TIMEOUT_S
from spiderfs.errors import ConfigError
from spiderfs.linux.mounts import Mount, within

# Less than the kernel's largest write, so that the daemon gets each piece of a list whole.
_PIECE_BYTES = 512 << 10


def wanted_paths(
    mount: Mount, mountpoint: str, paths: Iterable[str], globs: bool = True, gone: list[str] | None = None
) -> Iterator[str]:
    """The paths, and with `globs` globs, relative to the mount. Raises ConfigError.

    Paths without a file come into the list `gone` instead; without such a list they are an error.
    """
    # Of a source that hangs one path is asked, and not each: every question takes seconds.
    answers = True
    for path in paths:
        if path == "-":
            name = ""
            for line in () if sys.stdin is None else sys.stdin.buffer:
                if line != b"\n":
                    name = os.fsdecode(line.rstrip(b"\n"))
                    yield _relative(mount, mountpoint, name)
            if not name:
                raise ConfigError("there is no path on the standard input: write one a line")
        else:
            relative = _relative(mount, mountpoint, path)
            is_glob = globs and any(letter in relative for letter in "*?[")
            if is_glob or not answers:
                yield relative
            elif (found := _at_end_of_links(mount, relative)) is not None:
                answers = found.in_time
                yield found.path
            elif gone is None:
                raise ConfigError(f"{mount.mountpoint} has no file {relative}: write a path below it")
            else:
                gone.append(relative)


def _relative(mount: Mount, mountpoint: str, path: str) -> str:
    relative = path
    for root in (str(mount.mountpoint), os.path.abspath(mountpoint)):
        if path == root or path.startswith(root.rstrip("/") + "/"):
            relative = path[len(root) :].lstrip("/")
            break
    relative = os.path.normpath(relative)
    if relative.startswith("/") or relative.split("/")[0] == "..":
        raise ConfigError(f"{path} lies outside of the mount at {mount.mountpoint}: write a path below it")
    if "\n" in relative:
        raise ConfigError(f"{path} has a newline, and a list has one path a line: write ? in its place")
    return relative


class _Found(NamedTuple):
    path: str
    in_time: bool = True


def _at_end_of_links(mount: Mount, relative: str) -> _Found | None:
    """The path of the file that a path means, which must be one of the mount, or None; raises ConfigError."""
    path = f"{mount.mountpoint}/{relative}"
    try:
        found = within(ANSWER_TIMEOUT_S, lambda: os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        # The source may answer the daemon, and if not the daemon says so.
        return _Found(relative, not isinstance(exc, TimeoutError))
    return _Found(_relative(mount, str(mount.mountpoint), found))


def any_file(mount: Mount, wanted: Sequence[str]) -> bool:
    """Whether one of these paths and globs means a file of the mount, or the source does not say so in time."""

    def found() -> bool:
        root = mount.mountpoint
        return any(
            os.path.lexists(root / one) or any(iglob(one, root_dir=root, recursive=True, include_hidden=True))
            for one in wanted
        )

    try:
        return within(ANSWER_TIMEOUT_S, found)
    except TimeoutError:
        return True


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """The lines, as many at a time as the daemon takes at once."""
    piece, size = "", 0
    for line in lines:
        piece += f"{line}\n"
        size += len(os.fsencode(line)) + 1
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = "", 0
    if piece:
        yield piece
