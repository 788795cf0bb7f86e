"""The way of a file from the source into the store: what each process has that brings files."""

from __future__ import annotations

from dataclasses import dataclass

from spiderfs.metrics import Counters
from spiderfs.sources.client import SourceClient
from spiderfs.store.store import Content, Records
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.fetcher import Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.shown_views import ShownViews


@dataclass(frozen=True)
class Supply:
    """One process's; each part has been given those that it needs of the others."""

    content: Content
    records: Records
    client: SourceClient
    catalogue: Catalogue
    lister: Lister
    fetcher: Fetcher
    counters: Counters
    views: ShownViews | None = None
    """Where the mount shows views; see `Fetcher`."""
