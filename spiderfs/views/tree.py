"""Where a mount shows which form of a file: its root shows one, and directories in `.spiderfs/views` show the others.

The **forms** of a file are the original and its views. `.spiderfs/views/NAME/a/b` is the form NAME of the source's file
`a/b`. The name of the form that the root itself shows is a symbolic link to the root there: so each file has one path,
one inode and one copy in the cache for each form, and a path below `.spiderfs/views` is right whatever the root shows.

The root may also show some files as views and the others as originals. Which ones follows from a hash of the path, so
it is the same for every process, mount and epoch, and has nothing to do with what is in a file. Then each form has a
directory of its own in `.spiderfs/views`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import xxhash

from spiderfs.errors import SourceNotFound
from spiderfs.sources.source import Source, SourceStat, Version
from spiderfs.views.recipe import ORIGINAL, Recipe

P = ParamSpec("P")
T = TypeVar("T")

VIEWS_DIRECTORY = b".spiderfs/views"
ROOT_LINK = b"../.."
"""What the name of the form that the root shows is a link to."""
_ABOVE = (b".spiderfs", VIEWS_DIRECTORY)
_BELOW = VIEWS_DIRECTORY + b"/"
_HASHES = 1 << 64


class Place(NamedTuple):
    """What lies at a path of the mount: the `form` of the file `path` of the source, below the directory `root`.

    `root` is empty for the root of the mount.
    """

    form: str
    root: bytes
    path: bytes


class Forms:
    """The forms that a mount shows: the originals, and views by recipes."""

    def __init__(
        self,
        recipes: Mapping[str, Recipe] | None = None,
        shown: str = ORIGINAL,
        share: float = 1.0,
        fingerprint: Callable[[Recipe], bytes] = lambda recipe: str(recipe).encode(),
        mounted_at_s: float = 0.0,
    ) -> None:
        """`recipes`: those of all views; without any there is no directory of views. `shown`: what the root shows,
        of this `share` of the files; of the others the original.

        `fingerprint` says what a recipe's bytes depend on; it may take a tenth of a second. `mounted_at_s` tells the
        present mount from others.
        """
        self.recipes = recipes or {}
        self._below = round(share * _HASHES)
        self.shown = shown if self._below else ORIGINAL
        """The view that the root shows, or ORIGINAL."""
        self.mixed = self.shown != ORIGINAL and self._below < _HASHES
        """Whether the root shows that view of some files, and the others as originals."""
        self.linked = "" if self.mixed else self.shown
        """The form whose name is a link to the root; empty if there is none."""
        self.mounted_at_s = mounted_at_s
        self._fingerprint_of = fingerprint
        self._fingerprints: dict[str, bytes] = {ORIGINAL: b""}

    @property
    def names(self) -> list[bytes]:
        """The names in the directory of views; none if there is no such directory."""
        return [os.fsencode(name) for name in (ORIGINAL, *self.recipes)] if self.recipes else []

    @property
    def roots(self) -> list[bytes]:
        """The directories below which files are shown: the root of the mount, and one for each other form."""
        others = [_BELOW + name for name in self.names if os.fsdecode(name) != self.linked]
        return [b"", *others]

    def place(self, path: bytes) -> Place:
        """What lies at a path of the mount."""
        if not path.startswith(b".spiderfs"):
            return Place(self._form_at_root(path), b"", path)
        if path.startswith(_BELOW):
            name, _, below = path[len(_BELOW) :].partition(b"/")
            form = os.fsdecode(name)
            if form == self.linked:
                return Place(form, b"", below)
            if form == ORIGINAL or form in self.recipes:
                return Place(form, _BELOW + name, below)
        # The directories above show the attributes of the root. Nothing else of the source can be seen at such a path.
        return Place(self._form_at_root(path), b"", b"" if path in _ABOVE else path)

    def _form_at_root(self, path: bytes) -> str:
        if self.mixed and xxhash.xxh3_64_intdigest(path) >= self._below:
            return ORIGINAL
        return self.shown

    @property
    def of_root(self) -> bytes:
        """What the forms of the root's files depend on; empty for originals. It may take a tenth of a second."""
        fingerprint = self.fingerprint(self.shown)
        return b"%s %x" % (fingerprint, self._below) if self.mixed else fingerprint

    def known_fingerprint(self, form: str) -> bytes | None:
        """The fingerprint of a form, empty for originals; None if it has yet to be found out."""
        return self._fingerprints.get(form)

    def fingerprint(self, form: str, told: bytes | None = None) -> bytes:
        """The same, found out now unless another process has `told` it."""
        if form not in self._fingerprints:
            self._fingerprints[form] = told or self._fingerprint_of(self.recipes[form])
        return self._fingerprints[form]


class TreeSource:
    """`inner` at every path at which a form of it is shown: names, attributes, and the originals' bytes.

    The entries `hidden` of the source's root are not shown; what lies below them can still be read by its path.
    """

    def __init__(self, inner: Source, forms: Forms, hidden: Container[bytes] = ()) -> None:
        self._inner = inner
        self._forms = forms
        self._hidden = hidden
        self.undated_directories = inner.undated_directories
        self.statvfs = inner.statvfs
        self.read_present, self.readlink = self._at_place(inner.read_present), self._at_place(inner.readlink)
        self.listxattr, self.getxattr = self._at_place(inner.listxattr), self._at_place(inner.getxattr)

    def _at_place(self, ask: Callable[Concatenate[bytes, P], T]) -> Callable[Concatenate[bytes, P], T]:
        def asked(path: bytes, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return ask(self._forms.place(path).path, *args, **kwargs)

        return asked

    def stat(self, path: bytes) -> SourceStat:
        path = self._forms.place(path).path
        if path in self._hidden:
            raise SourceNotFound(f"{os.fsdecode(path)} is not shown")
        return self._inner.stat(path)

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        path = self._forms.place(path).path
        entries = self._inner.scan(path)
        return entries if path else (entry for entry in entries if entry[0] not in self._hidden)

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        return self._inner.read(self._forms.place(path).path, offset, length, version)

    def close(self) -> None:
        self._inner.close()
