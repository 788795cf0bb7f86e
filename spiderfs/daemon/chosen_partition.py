"""The partition of a mount's cache among forms: from its option `forms` and a profile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from spiderfs.errors import ConfigError
from spiderfs.forms.partition import MOST_AUGMENTED, FormSizes, Split, view_share
from spiderfs.forms.profile import Record, landing_bytes, load_record
from spiderfs.options.model import AUTO, ONE_FORM, Options
from spiderfs.views.recipe import NO_VIEW


class Partition(NamedTuple):
    """`split` is that of the capacity, None if there is none.

    `view_share` is the share of all files that the root shows as views, if it shows a view at all, and
    `partials_share` the share of the capacity that augmented samples may take.
    """

    split: Split | None
    view_share: float
    partials_share: float

    def status(self, view: bool) -> dict[str, str | float | None]:
        """`view`: whether the root shows a view."""
        split = None if self.split is None else str(self.split)
        return {"split": split, "view_share": self.view_share if view else 0.0}


def chosen_partition(options: Options, record_path: Path) -> Partition:
    """The partition of a mount with these options; raises ConfigError if it needs a profile that is not there."""
    if options.forms == ONE_FORM:
        return Partition(None, 1.0, options.partials_share)
    view = None if options.view == NO_VIEW else options.view
    if options.forms == AUTO:
        record = load_record(record_path)
        profile = None if record is None else record.profile
        if record is None or profile is None or (view is not None and view not in profile.views):
            raise _unprofiled(options, "--loader MODULE:FUNCTION" + (f" --view {view}" if view is not None else ""))
        split = replace(profile, cache_bytes=float(_capacity_bytes(options, record))).best(view)
    else:
        split = Split.parse(options.forms)
        record = load_record(record_path) if split.decoded else None
        if split.decoded and (record is None or view not in record.sample_bytes):
            raise _unprofiled(options, f"--view {view}")
    share = 0.0
    if split.decoded and record is not None and view is not None:
        capacity = _capacity_bytes(options, record)
        sizes = FormSizes(record.sample_bytes[NO_VIEW], record.sample_bytes[view], 0.0)
        share = view_share(split, capacity, landing_bytes(capacity, sizes), record.samples, sizes)
    return Partition(split, share, min(split.augmented, MOST_AUGMENTED))


class NextPartition:
    """The partition that a mount would have if it were mounted now: see `chosen_partition`."""

    def __init__(self, record_path: Path) -> None:
        self._record_path = record_path
        self._of: tuple[object, ...] = ()
        self._found: Partition | None = None

    def found(self, options: Options) -> Partition | None:
        """None if a mount with these options would need another profile.

        Where a profile or an option is new, this takes some tenths of a second for forms=auto.
        """
        try:
            status = os.stat(self._record_path)
            written = status.st_ino, status.st_mtime_ns
        except OSError:
            written = 0, 0
        of = (*written, options.forms, options.view, options.capacity, options.partials_share)
        if of != self._of:
            self._of = of
            try:
                self._found = chosen_partition(options, self._record_path)
            except ConfigError:
                self._found = None
        return self._found


def _capacity_bytes(options: Options, record: Record) -> int:
    """A share of the source is one of what was profiled."""
    return options.capacity.budget_bytes(int(record.samples * record.sample_bytes[NO_VIEW]))


def _unprofiled(options: Options, words: str) -> ConfigError:
    return ConfigError(
        f"forms={options.forms} needs to know what samples take: mount without forms once and run"
        f" 'spiderfs profile {options.mountpoint} {words}'"
    )
