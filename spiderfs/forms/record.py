"""What the last `spiderfs profile` of a mount has found, as the mounts to come find it in the cache directory."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spiderfs.errors import UsageError
from spiderfs.forms.profile import Cost, Form, Profile, Reads, SourceSpeed
from spiderfs.views.recipe import NO_VIEW


@dataclass(frozen=True)
class Record:
    """How many samples the training has, the mean bytes of one as an original and as each view, and the profile.

    The bytes are by the view's name, and NO_VIEW. The profile is None as long as no loader was measured.
    """

    samples: int
    sample_bytes: dict[str, float]
    profile: Profile | None


def save(record: Record, path: Path) -> None:
    """Replace what was found before, but for the profile of a loader if none was measured now; raises UsageError."""
    before = load(path)
    profile = record.profile or (before.profile if before is not None else None)
    told = {**asdict(record), "profile": None if profile is None else asdict(profile)}
    # A mount says itself where its cache is. Whoever runs the command for another user's mount writes nothing there.
    try:
        if path.parent.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        # A new file of a name that nobody could foresee: where a link lies, its target would be overwritten.
        fd, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with os.fdopen(fd, "w") as file:
            file.write(json.dumps(told) + "\n")
        os.rename(new, path)
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be written ({exc.strerror}), so no mount can go by this profile: run it as the mount's user"
        ) from exc


def load(path: Path) -> Record | None:
    """The record that lies there; None if there is none that can be read."""
    try:
        told = json.loads(path.read_bytes())
        profile = told["profile"]
        sizes = {str(name): float(size) for name, size in told["sample_bytes"].items()}
        samples = int(told["samples"])
        if samples < 1 or NO_VIEW not in sizes or not all(0 < size < math.inf for size in sizes.values()):
            return None
        return Record(samples, sizes, None if profile is None else _profile(profile))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _profile(told: dict[str, Any]) -> Profile:
    views = {name: _form(form) for name, form in told["views"].items()}
    rest = {
        "source": SourceSpeed(*told["source"]),
        "uncached": Cost(*told["uncached"]),
        "encoded": _form(told["encoded"]),
        "augmented": _form(told["augmented"]),
        "keeping": Cost(*told["keeping"]),
        "views": views,
    }
    return Profile(**{**told, **rest})


def _form(told: dict[str, Any]) -> Form:
    reads = told["reads"]
    return Form(told["sample_bytes"], None if reads is None else Reads(*reads), Cost(*told["cost"]))
