"""The option strings of mount(8): `a=b,c=d`, and the words in them that are not for spiderfs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from spiderfs.errors import ConfigError

# Words of mount(8), fstab(5) and systemd.mount(5) that are for others, or true of every spiderfs mount anyway.
# fmt: off
IGNORED_WORDS = frozenset({
    "ro", "defaults", "auto", "noauto", "user", "nouser", "users", "owner", "group", "nofail", "_netdev", "comment",
    "async", "sync", "atime", "noatime", "relatime", "strictatime", "nodiratime", "diratime", "suid", "nosuid", "dev",
    "nodev", "exec", "noexec",
})
# fmt: on
IGNORED_PREFIXES = ("x-", "X-")

REFUSED_WORDS = {
    "rw": "spiderfs is read-only: leave rw away",
    "remount": "a mount cannot be remounted: change it with 'spiderfs config MOUNTPOINT NAME=VALUE'",
}

# A comma inside a value is written `\,`, as in mount.fuse3(8).
_UNESCAPED_COMMA = re.compile(r"(?<!\\),")


def split_words(options: str) -> list[str]:
    """The words of one option string, still escaped; empty ones are left out."""
    return [word for word in _UNESCAPED_COMMA.split(options) if word.strip()]


def options_in(strings: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value) of every word meant for spiderfs; the value is None where there is no `=`.

    Raises ConfigError for a word of mount(8) that cannot be granted.
    """
    for word in (word for string in strings for word in split_words(string)):
        name, equals, value = word.strip().partition("=")
        if name in REFUSED_WORDS:
            raise ConfigError(f"{name}: {REFUSED_WORDS[name]}")
        if name not in IGNORED_WORDS and not name.startswith(IGNORED_PREFIXES):
            yield name, value.replace("\\,", ",") if equals else None
