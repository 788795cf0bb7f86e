"""The messages between a pool and its makers; originals and views themselves lie in a memory file that both map."""

from __future__ import annotations

import struct

from spiderfs.views.recipe import FORMATS, Recipe

_REQUEST = struct.Struct("<QBHB")
REQUEST_BYTES = _REQUEST.size
ANSWER = struct.Struct("<BQ")
"""MADE or a reason of `Unmade`, and the view's length."""
MADE = 0


def request(length: int, recipe: Recipe) -> bytes:
    """The message that asks for a view of an original of `length` bytes."""
    return _REQUEST.pack(length, FORMATS.index(recipe.format), recipe.short_side, recipe.quality)


def parse_request(message: bytes) -> tuple[int, Recipe]:
    """The original's length, and the recipe."""
    length, kind, short_side, quality = _REQUEST.unpack(message)
    return length, Recipe(FORMATS[kind], short_side, quality)
