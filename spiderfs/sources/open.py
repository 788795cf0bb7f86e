"""Making a source from the name that a user gave it: the path of a directory, or the URL of something else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from spiderfs.errors import ConfigError
from spiderfs.sources.buckets.azure import AzureContainer
from spiderfs.sources.buckets.google import GoogleBucket
from spiderfs.sources.buckets.s3 import S3Bucket
from spiderfs.sources.buckets.source import BucketSource
from spiderfs.sources.local import LocalSource
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.source import Source
from spiderfs.sources.web.hub import HubSource
from spiderfs.sources.web.manifest import ManifestSource


class OpenedSource(Source, Protocol):
    @property
    def root_fd(self) -> int | None:
        """A descriptor of the root, where that is a directory of this machine."""

    @property
    def identity(self) -> str:
        """The one name of the source, to which what is cached of it is bound; no other source has it.

        It says where the source lies, as that is found now; the network is not asked. Raises SourceUnavailable where it
        cannot be found.
        """


class Opener(NamedTuple):
    """How sources of one kind are made; `make` asks the network nothing, for each process connects by itself."""

    make: Callable[[str, StoreSettings], OpenedSource]
    settings: frozenset[str] = frozenset()
    """The options `source.NAME` that mean something for them."""


_PLACE = frozenset({"endpoint", "anonymous"})
# By the scheme with which the name of a source begins; a directory has none.
OPENERS: Mapping[str, Opener] = {
    "": Opener(lambda named, _: LocalSource(named)),
    "s3": Opener(partial(BucketSource, S3Bucket), _PLACE | {"region", "profile", "requester_pays", "addressing"}),
    "gs": Opener(partial(BucketSource, GoogleBucket), _PLACE),
    "az": Opener(partial(BucketSource, AzureContainer), _PLACE),
    "hf": Opener(HubSource, _PLACE),
    "http": Opener(ManifestSource),
    "https": Opener(ManifestSource),
}


DEFAULTS = StoreSettings()
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")
# Passwords may have slashes and further @ in them, although they should not.
_LOGIN, _QUERY = re.compile(r"(:/*).*@", re.DOTALL), re.compile(r"\?.*", re.DOTALL)


def is_url(named: object) -> bool:
    """Whether this is the name of a source that is no directory, of a kind that spiderfs knows."""
    scheme = scheme_of(named)
    return scheme != "" and scheme in OPENERS


def without_secrets(named: object) -> str:
    """The text of an address as it may be repeated to a user: without what logs in or signs."""
    return _QUERY.sub("?...", _LOGIN.sub(r"\1...@", str(named)))


def open_source(named: str | Path, settings: StoreSettings = DEFAULTS) -> OpenedSource:
    """Open the source with this name; raises ConfigError if there is no such source."""
    scheme = scheme_of(named)
    if scheme not in OPENERS:
        raise ConfigError(f"{named} is of an unknown kind of source: name a directory")
    return OPENERS[scheme].make(str(named), settings)


def identity_of(named: str | Path, settings: StoreSettings = DEFAULTS) -> str:
    """See `OpenedSource.identity`; a directory is not touched for it."""
    return open_source(named, settings).identity if is_url(named) else os.path.realpath(named)


def identity_between_nodes(source: OpenedSource) -> str:
    """The one name that a source has on all nodes; mounts of another source neither give nor take its bytes.

    That of a URL is its identity. A directory is named by the server's name of it, where a network file system tells
    that (`nas:/export/imagenet`), and else by the path that the user gave, which is then the same on all nodes.
    """
    return source.shared_identity if isinstance(source, LocalSource) else source.identity


def scheme_of(named: object) -> str:
    """The scheme of a URL; empty for a path."""
    found = _URL.match(named) if isinstance(named, str) else None
    return found[1] if found else ""
