"""Which objects of a bucket are which files: the names of object stores, turned into paths and back.

A bucket knows no directories: its keys are texts, and a `/` in a key is a character like others. A mount shows the keys
below a prefix as a tree, under these rules:

- `a/b.jpg` is the file `b.jpg` in the directory `a`, whether there is an object `a/` or not. An object `a/` makes the
  directory `a` exist, also an empty one; what is in that object is not shown.
- Where there are both an object `d` and objects `d/...`, `d` is a directory, and the object `d` is not shown.
- A key that has a part which cannot be a name is not shown: an empty part (`a//b`, `/lead.jpg`), `.` or `..`, more than
  255 bytes, or control characters. A key is text, so no name is anything but UTF-8.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from spiderfs.errors import ConfigError, SourceNotFound

NAME_MAX = 255
# S3 has no longer keys, and other stores have none either.
KEY_MAX = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f/]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_name(part: str) -> bool:
    """Whether a part of a key can be the name of a file."""
    if part in ("", ".", "..") or _CONTROL.search(part):
        return False
    return len(part) * 4 <= NAME_MAX or len(part.encode(errors="surrogatepass")) <= NAME_MAX


class Place(NamedTuple):
    """A bucket, and the prefix of all keys that are shown; the prefix is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Place:
        """From `SCHEME://BUCKET` or `SCHEME://BUCKET/PREFIX`; raises ConfigError, which repeats no password."""
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.removesuffix("/")
        if "?" in rest or ("@" in rest and not _BUCKET.fullmatch(bucket)):
            raise ConfigError(
                f"the source has more than {scheme}://BUCKET/PREFIX: leave out what signs or logs in (credentials are"
                " found in variables and profiles, as other programs find them)"
            )
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(f"{url} names no bucket: write {scheme}://BUCKET or {scheme}://BUCKET/PREFIX")
        if prefix and not all(map(is_name, prefix.split("/"))):
            raise ConfigError(f"{url} has a prefix that cannot be a path: write {scheme}://BUCKET/PREFIX")
        return cls(bucket, f"{prefix}/" if prefix else "")

    def key(self, path: bytes) -> str:
        """The key of a file; raises SourceNotFound where no key can be shown as this path."""
        try:
            text = path.decode()
        except UnicodeDecodeError:
            text = ""
        key = self.prefix + text
        if not all(map(is_name, text.split("/"))) or len(self.prefix.encode()) + len(path) > KEY_MAX:
            raise SourceNotFound(f"{path.decode(errors='backslashreplace')}: no object can have this name")
        return key

    def directory(self, path: bytes) -> str:
        """What all keys below a directory begin with; raises SourceNotFound as `key` does."""
        return f"{self.key(path)}/" if path else self.prefix
