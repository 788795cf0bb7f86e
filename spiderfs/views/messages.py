"""The messages between a pool and its makers; originals and views themselves lie in a memory file that both map.

Why there is no view of a file: what makers answer then, and what the log says of it.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from spiderfs.views.recipe import FORMATS, Recipe


class Unmade(IntEnum):
    """Why there is no view of a file, which is then shown as it is."""

    NO_IMAGE = 1
    DAMAGED = 2
    MODE = 3
    PIXELS = 4
    ORIENTATION = 5
    SMALL = 6
    MEMORY = 7
    PICTURES = 8


REASONS = {
    Unmade.NO_IMAGE: "it is no image, or of a format that no view is made of",
    Unmade.DAMAGED: "its image is damaged or cut short",
    Unmade.MODE: "its image is neither 8-bit grey nor 8-bit RGB",
    Unmade.PIXELS: "its image has more pixels than view_megapixels allows",
    Unmade.ORIENTATION: "its image has an orientation for which a view of this format has no place",
    Unmade.SMALL: "its image is as small as the view, and of the same format",
    Unmade.MEMORY: "its image takes more memory than a maker may have",
    Unmade.PICTURES: "it is an animation, and a view is one image",
}


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
