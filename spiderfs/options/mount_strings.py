"""Option strings as mount(8) has them, `a=b,c=d`, and what mount(8)'s own options mean for spiderfs.

spiderfs ignores none of mount(8)'s options without a reason: each is already true of every spiderfs mount, or concerns
other programs, or sets an option of spiderfs, or is refused with a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from spiderfs.errors import ConfigError

# Options of mount(8), fstab(5) and systemd.mount(5) for which spiderfs has nothing to do: they tell other programs who
# may mount and when, or they are true of every spiderfs mount. Such a mount is never written to, ignores setuid bits
# and devices, and shows a file's mtime as its access time, which reading does not change.
# fmt: off
GRANTED_OPTIONS = frozenset({
    "ro", "defaults", "auto", "noauto", "nouser", "owner", "group", "nofail", "_netdev", "comment", "async", "sync",
    "nosuid", "nodev", "atime", "noatime", "relatime", "diratime", "nodiratime",
})
# fmt: on
GRANTED_PREFIXES = ("x-", "X-")

# Options of mount(8) that set an option of spiderfs. `user` and `users` imply noexec unless `exec` follows (mount(8)).
SETTING_OPTIONS = {"noexec": ("exec", "off"), "user": ("exec", "off"), "users": ("exec", "off")}

REFUSED_OPTIONS = {
    "rw": "a spiderfs mount is read-only: leave out rw",
    "remount": "a spiderfs mount cannot be remounted: change its options with 'spiderfs config MOUNTPOINT NAME=VALUE'",
    "suid": "a spiderfs mount ignores setuid bits: leave out suid",
    "dev": "a spiderfs mount shows no devices: leave out dev",
    "strictatime": "a spiderfs mount keeps no access times: leave out strictatime",
}

# A comma that belongs to a value is written `\,`, as in mount.fuse3(8).
_UNESCAPED_COMMA = re.compile(r"(?<!\\),")


def split_options(string: str) -> list[str]:
    """The options in one option string, still escaped; empty ones are left out."""
    return [option for option in _UNESCAPED_COMMA.split(string) if option.strip()]


def option_string(values: Mapping[str, str]) -> str:
    """The option string that sets these options; `options_in` reads it."""
    return ",".join(f"{name}={value}".replace(",", "\\,") for name, value in values.items())


def options_in(strings: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Name and value (None without `=`) of each option for spiderfs; raises ConfigError for one that it refuses."""
    for option in (option for string in strings for option in split_options(string)):
        name, equals, value = (part.strip() for part in option.partition("="))
        if name in REFUSED_OPTIONS:
            raise ConfigError(f"{name}: {REFUSED_OPTIONS[name]}")
        if name in SETTING_OPTIONS:
            yield SETTING_OPTIONS[name]
        elif name not in GRANTED_OPTIONS and not name.startswith(GRANTED_PREFIXES):
            yield name, value.replace("\\,", ",") if equals else None
