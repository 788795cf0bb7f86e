"""The samples of WebDataset's shards that a mount shows as directories (`-o archives=tar`)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

# Kinds of members that say something of a sample, and are none themselves.
_NOT_SAMPLES = frozenset({"cls", "json", "txt", "id", "index"})
_SHARDS = (".tar", ".zip")
_NO_CLASS = -1
_SAY_LABEL = 'label="cls" or label="json.NAME", or that there are none with label=None'
# Each label is a file; the first time it comes from the index of its shard, through a process of the mount.
_READERS = 16


def webdataset_samples(
    directory: str | os.PathLike[str], *, sample: str | None = None, label: str | None = "cls"
) -> list[tuple[str, int]]:
    """A pair (path, label) for each sample of the shards at and below `directory`, sorted by shard and key.

    The members of a shard that are called the same up to their first dot are one sample, as in WebDataset. Its path is
    that of the member with the extension `sample` (such as "jpg" or "image.jpg"), by default of the only one whose last
    extension is neither `cls`, `json`, `txt`, `id` nor `index`. Its label is the whole number in the member `label`, or
    with "json.NAME" the field NAME of the member `json`; with None, for samples without classes, it is -1. Files beside
    shards, and those whose names begin with a dot, belong to no sample. Where there are no shards, all files count.
    Give the result to `plan` or `attach` as `samples=`, and read the paths in the data set.

    Raises ValueError for a sample without a label, or with none or several members to choose from, for a shard that is
    a file, and if there are no samples; and OSError, also for a single shard or directory that cannot be listed.
    """
    found: list[tuple[str, tuple[str, str] | None]] = []
    for key, members in _grouped(os.fspath(directory)):
        others = [each for each in members if each.rpartition(".")[2] not in _NOT_SAMPLES]
        extensions = [sample] if sample is not None else others
        if len(extensions) != 1 or extensions[0] not in members:
            what = f"the members {', '.join(sorted(members))}"
            raise ValueError(f'{key} has {what}: name the extension of samples with sample="jpg", or another extension')
        found.append((f"{key}.{extensions[0]}", _place_of_label(key, members, label)))
    with ThreadPoolExecutor(_READERS) as threads:
        labels = threads.map(lambda pair: _NO_CLASS if pair[1] is None else _label(*pair[1]), found)
        return [(path, known) for (path, _), known in zip(found, labels, strict=True)]


def _grouped(directory: str) -> list[tuple[str, set[str]]]:
    """The path of each sample up to its first dot, and the extensions of its members."""
    inside: list[tuple[str, set[str]]] = []
    beside: list[tuple[str, set[str]]] = []
    archives: list[str] = []
    shown: set[str] = set()
    for above, directories, names in os.walk(directory, onerror=_raise, followlinks=True):
        kinds = {kind for kind in _SHARDS if f"{kind}/" in f"{os.path.abspath(above)}/"}
        shown |= kinds
        directories[:] = sorted(name for name in directories if kinds or name[:1] != ".")
        samples: dict[str, set[str]] = {}
        for name in names:
            key, dot, extension = name.partition(".")
            if key and dot:
                samples.setdefault(key, set()).add(extension)
        (inside if kinds else beside).extend((os.path.join(above, key), samples[key]) for key in sorted(samples))
        archives += [os.path.join(above, name) for name in names if not kinds and name.endswith(_SHARDS)]
    for path in archives:
        if path.endswith(tuple(shown) or _SHARDS):
            raise ValueError(f"{path} is a file: mount with -o archives=tar, and put the shard itself where a link is")
    if not (found := inside if shown else beside):
        raise ValueError(f"there are no samples at or below {directory}: name the directory of the shards")
    return found


def _raise(exc: OSError) -> NoReturn:
    # The mount knows why an archive cannot be shown.
    with contextlib.suppress(OSError):
        exc.strerror = os.getxattr(exc.filename, "user.spiderfs.failure").decode()
    raise exc


def _place_of_label(key: str, members: Container[str], label: str | None) -> tuple[str, str] | None:
    """The file that a sample's label is in, and the field of it; None if samples have no labels."""
    if label is None:
        return None
    dots = [at for at, letter in enumerate(f"{label}.") if letter == "."]
    for end in reversed(dots):
        if label[:end] in members:
            return f"{key}.{label[:end]}", label[end + 1 :]
    raise ValueError(f"{key} has no .{label}: name the place of its label with {_SAY_LABEL}")


def _label(path: str, field: str) -> int:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        return int(json.loads(text)[field]) if field else int(text)
    except (ValueError, TypeError, KeyError, IndexError):
        wanted = f"no whole number {field!r}" if field else "no whole number"
        raise ValueError(f"{path} holds {wanted}: name the place of labels with {_SAY_LABEL}") from None
