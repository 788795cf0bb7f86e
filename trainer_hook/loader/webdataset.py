"""The samples of WebDataset's shards that a mount shows as directories (`-o archives=tar`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

# Members that say something of a sample, and are none themselves.
_NOT_SAMPLES = frozenset({"cls", "json", "txt", "id", "index"})
# Each label is a file; the first time it comes from the index of its shard, through a process of the mount.
_READERS = 16


def webdataset_samples(
    directory: str | os.PathLike[str], *, sample: str | None = None, label: str = "cls"
) -> list[tuple[str, int]]:
    """A pair (path, label) for each sample of the shards at and below `directory`, sorted by shard and key.

    The members of a shard that are called the same up to their first dot are one sample, as in WebDataset. Its path is
    that of the member with the extension `sample` (such as "jpg"), by default of the only one that is neither `cls`,
    `json`, `txt`, `id` nor `index`. Its label is the whole number in the member `cls`, or with `label="json.NAME"` the
    field NAME of the member `json`. Give the result to `plan` or `attach` as `samples=`, and read the paths in the data
    set. Raises ValueError for a sample without a label, or with none or several members to choose from, and OSError.
    """
    extension, _, field = label.partition(".")
    found: list[tuple[str, str]] = []
    for key, members in _grouped(os.fspath(directory)):
        names = [sample] if sample is not None else [name for name in members if name not in _NOT_SAMPLES]
        if len(names) != 1 or names[0] not in members:
            what = f"the members {', '.join(sorted(members))}"
            raise ValueError(f'{key} has {what}: say which is the sample with sample="jpg", or another extension')
        if extension not in members:
            raise ValueError(f'{key} has no .{extension}: say where its label is with label="cls" or label="json.NAME"')
        found.append((f"{key}.{names[0]}", f"{key}.{extension}"))
    with ThreadPoolExecutor(_READERS) as threads:
        labels = threads.map(lambda pair: _label(pair[1], field), found)
        return [(path, known) for (path, _), known in zip(found, labels, strict=True)]


def _grouped(directory: str) -> Iterator[tuple[str, set[str]]]:
    """The path of each sample up to its first dot, and the extensions of its members."""
    for above, directories, names in os.walk(directory):
        directories.sort()
        samples: dict[str, set[str]] = {}
        for name in names:
            key, dot, extension = name.partition(".")
            if dot:
                samples.setdefault(key, set()).add(extension)
        for key in sorted(samples):
            yield os.path.join(above, key), samples[key]


def _label(path: str, field: str) -> int:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        return int(json.loads(text)[field]) if field else int(text)
    except (ValueError, TypeError, KeyError, IndexError):
        wanted = f"no whole number {field!r}" if field else "no whole number"
        raise ValueError(f'{path} holds {wanted}: say where labels are with label="cls" or label="json.NAME"') from None
