"""The option strings of mount(8): `a=b,c=d`, and what the words of mount(8) in them mean for spiderfs.

None of these is passed over: each is true of the mount then, or sets an option, or is refused with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from spiderfs.errors import ConfigError

# Words of mount(8), fstab(5) and systemd.mount(5) that need nothing done: they are for others (who may mount, when), or
# true of every spiderfs mount. Nothing in one is ever written, no setuid bit and no device counts, and what is shown
# as a file's access time is its mtime, which reading does not change.
# fmt: off
GRANTED_WORDS = frozenset({
    "ro", "defaults", "auto", "noauto", "nouser", "owner", "group", "nofail", "_netdev", "comment", "async", "sync",
    "nosuid", "nodev", "atime", "noatime", "relatime", "diratime", "nodiratime",
})
# fmt: on
GRANTED_PREFIXES = ("x-", "X-")

# Words that set an option. That of who may mount implies noexec, unless `exec` follows (mount(8)).
SETTING_WORDS = {"noexec": ("exec", "off"), "user": ("exec", "off"), "users": ("exec", "off")}

REFUSED_WORDS = {
    "rw": "spiderfs is read-only: leave rw away",
    "remount": "a mount cannot be remounted: change it with 'spiderfs config MOUNTPOINT NAME=VALUE'",
    "suid": "setuid bits never count in a spiderfs mount: leave suid away",
    "dev": "devices are not shown by a spiderfs mount: leave dev away",
    "strictatime": "spiderfs keeps no access times: leave strictatime away",
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
        if name in SETTING_WORDS:
            yield SETTING_WORDS[name]
        elif name not in GRANTED_WORDS and not name.startswith(GRANTED_PREFIXES):
            yield name, value.replace("\\,", ",") if equals else None
