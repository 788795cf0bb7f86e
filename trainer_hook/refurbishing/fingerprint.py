"""A name for what a pipeline makes of a sample: the same in each training that would make the same, and in no other.

It is the hash of the pickled data set with its first transforms, of the source files of all classes and functions in
it, and of the versions of the libraries that decode and transform. The whole data set counts, because a sample is made
of its label too, and of whatever else the data set goes by. States of random generators do not count, because what they
draw for a sample follows from its seed (`seeding.py`). What cannot be pickled, or whose source is no file, gets a name
that nobody else has.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import pickle
import sys
import uuid
from pathlib import Path
from typing import Any

from trainer_hook.refurbishing.seeding import GENERATORS

# What decodes and transforms, as far as it is installed.
_LIBRARIES = ("torch", "torchvision", "numpy", "pillow", "opencv-python", "opencv-python-headless", "albumentations")


class _Pickler(pickle.Pickler):
    """Pickles into a hash, and notes the modules of all classes and functions on the way."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def write(self, pickled: Any) -> None:
        # A list of a million samples is never in memory a second time.
        self.digest.update(pickled)

    def reducer_override(self, value: Any) -> Any:
        # This is asked of each object that pickle does not know by itself, and of classes and functions.
        kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
        self.modules |= {str(one.__module__) for one in getattr(kind, "__mro__", (kind,)) if one is not object}
        return (str, (kind.__qualname__,)) if isinstance(value, GENERATORS) else NotImplemented


def fingerprint(dataset: Any, *given: Any) -> str:
    """The name of what this data set gives with these transforms, and of all else that is `given`: 32 digits."""
    pickler = _Pickler()
    digest = pickler.digest
    try:
        pickler.dump((given, dataset))
    except Exception:  # whatever a transform's own way of pickling raises
        return uuid.uuid4().hex
    digest.update(sys.version.encode())
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{library} {importlib.metadata.version(library)}".encode())
    for module in sorted(pickler.modules - set(sys.builtin_module_names)):
        file = getattr(sys.modules.get(module), "__file__", None)
        try:
            digest.update(hashlib.blake2b(Path(file or "").read_bytes()).digest())
        except OSError:
            return uuid.uuid4().hex
    return digest.hexdigest()
