"""Making a source from the name that a user gave it."""

from __future__ import annotations

from spiderfs.errors import ConfigError
from spiderfs.sources.local import LocalSource

# The function that makes a source of each kind, by the scheme with which its name begins; a directory has no scheme.
OPENERS = {"": LocalSource}


def open_source(named: str) -> LocalSource:
    """Open the source with this name; raises ConfigError if there is no such source."""
    scheme, _, _ = named.rpartition("://")
    if scheme not in OPENERS:
        raise ConfigError(f"{named} is a source of a kind that spiderfs does not know: name a directory")
    return OPENERS[scheme](named)
