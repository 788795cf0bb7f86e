"""Making a source from the name that a user gave it: the path of a directory, or the URL of an object store."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from spiderfs.errors import ConfigError
from spiderfs.sources.local import LocalSource
from spiderfs.sources.s3 import S3Source
from spiderfs.sources.s3_bucket import StoreSettings
from spiderfs.sources.source import Source


class OpenedSource(Source, Protocol):
    @property
    def root_fd(self) -> int | None:
        """A descriptor of the root, where that is a directory of this machine."""


# The function that makes a source of each kind, by the scheme with which its name begins; a directory has no scheme.
# It asks the network nothing: each process of a mount makes its own connections, when it asks its first question.
OPENERS: Mapping[str, Callable[[str, StoreSettings], OpenedSource]] = {
    "": lambda named, _: LocalSource(named),
    "s3": S3Source,
}


DEFAULTS = StoreSettings()
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")
# Passwords may have slashes and further @ in them, although they should not.
_LOGIN, _QUERY = re.compile(r"(:/*).*@", re.DOTALL), re.compile(r"\?.*", re.DOTALL)


def is_url(named: object) -> bool:
    """Whether this is the name of a source that is no directory, of a kind that spiderfs knows."""
    scheme = _scheme(named)
    return scheme != "" and scheme in OPENERS


def without_secrets(named: object) -> str:
    """The text of an address as it may be repeated to a user: without what logs in or signs."""
    return _QUERY.sub("?...", _LOGIN.sub(r"\1...@", str(named)))


def open_source(named: str | Path, settings: StoreSettings = DEFAULTS) -> OpenedSource:
    """Open the source with this name; raises ConfigError if there is no such source."""
    scheme = _scheme(named)
    if scheme not in OPENERS:
        raise ConfigError(f"{named} is a source of a kind that spiderfs does not know: name a directory")
    return OPENERS[scheme](str(named), settings)


def _scheme(named: object) -> str:
    """The scheme of a URL; empty for a path."""
    found = _URL.match(named) if isinstance(named, str) else None
    return found[1] if found else ""
