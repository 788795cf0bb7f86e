"""Places of mounts that have been profiled, for tests of `forms`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spiderfs.forms.profile import Record, save_record
from spiderfs.shared.layout import CacheLayout


def note_sizes(place: Path, samples: int, form_bytes: Mapping[str, int]) -> None:
    """Leave in a mount's place what a profile notes of sizes: `form_bytes` are those of all samples in each form."""
    (place / "cache").mkdir(parents=True, mode=0o700)
    sizes = {form: whole / samples for form, whole in form_bytes.items()}
    save_record(Record(samples, sizes, None), CacheLayout(place / "cache").profile)
