"""Recipes: the definition of a view as text, and the messages between a pool and its makers.

Originals and views themselves lie in a memory file that pool and maker both map.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

FORMATS = ("jpeg", "bmp", "png", "npy")
# JPEG alone loses something, so it alone has a quality; this is the default.
_QUALITY = 90
# Beyond these, Pillow's quality tables are the same or its files have artefacts that a training would learn.
_QUALITIES = range(30, 101)
_SHORT_SIDES = range(8, 8193)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
# What is written between the recipes of `-o views=`, and between the parts of one; mount(8) leaves both alone.
_NEXT, _PART = "+", ":"
# With this word `-o view=` says that originals are shown.
NO_VIEW = "none"
ORIGINAL = "original"
"""The name of what is no view, in the directory of views and in figures."""


_REQUEST = struct.Struct("<QBHB")
REQUEST_BYTES = _REQUEST.size
ANSWER = struct.Struct("<BQ")
"""MADE or a reason of `Unmade`, and the view's length."""
MADE = 0


class Recipe(NamedTuple):
    """An image whose shorter side has at most `short_side` pixels, in one of FORMATS; `quality` is JPEG's, else 0."""

    format: str
    short_side: int
    quality: int = 0

    @classmethod
    def checked(cls, format: object, short_side: object, quality: object = None) -> Recipe:
        """The recipe with these values; raises ValueError with one line that says what to write instead."""
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r} of a view: choose one of {', '.join(FORMATS)}")
        if format != "jpeg" and quality is not None:
            raise ValueError(f"only jpeg has a quality: leave it out of a view with format {format}")
        side = _whole(short_side, "short_side", _SHORT_SIDES)
        if format != "jpeg":
            return cls(str(format), side)
        return cls(str(format), side, _whole(_QUALITY if quality is None else quality, "quality", _QUALITIES))

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """A recipe from `jpeg:256:90`, `jpeg:256` or `bmp:256`; raises ValueError."""
        parts = text.split(_PART)
        if not 2 <= len(parts) <= 3:
            raise ValueError(f"{text!r} is no recipe of a view: write it like jpeg:256:90 or bmp:256")
        return cls.checked(*parts)

    def __str__(self) -> str:
        return _PART.join(str(part) for part in self if part)

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the view of an image, in pixels: the same shape, and never larger than the image."""
        short = min(width, height)
        if short <= self.short_side:
            return width, height
        # In whole numbers, so that no library's rounding matters.
        scaled = [max(1, (2 * side * self.short_side + short) // (2 * short)) for side in (width, height)]
        return scaled[0], scaled[1]


READY: Mapping[str, Recipe] = {
    "jpeg256": Recipe("jpeg", 256, _QUALITY),
    "jpeg512": Recipe("jpeg", 512, _QUALITY),
    "bmp256": Recipe("bmp", 256),
    "png256": Recipe("png", 256),
    "npy256": Recipe("npy", 256),
}
"""Recipes for the usual cases: the resize before a crop of 224 or 448 pixels. Every mount has these."""


def parse_recipes(value: object) -> dict[str, Recipe]:
    """Recipes by name from a table of a TOML file, or from `small:jpeg:256:90+tiny:bmp:160`; raises ValueError."""
    if isinstance(value, str):
        named = [part.partition(_PART) for part in value.split(_NEXT)] if value != NO_VIEW else []
        found: dict[str, Recipe] = {name: Recipe.parse(recipe) for name, _, recipe in named}
    elif isinstance(value, Mapping):
        found = {str(name): _from_table(str(name), table) for name, table in value.items()}
    else:
        raise ValueError("views are tables: write [views.small] with short_side and format below it")
    for name in found:
        if not _NAME.fullmatch(name) or name in (NO_VIEW, ORIGINAL):
            raise ValueError(f"{name!r} cannot be the name of a view: use letters, digits, - and _, 32 at most")
        if name in READY:
            raise ValueError(f"{name} is a view that every mount has: choose another name")
    return found


def format_recipes(recipes: Mapping[str, Recipe]) -> str:
    """The text that `parse_recipes` reads back unchanged."""
    return _NEXT.join(f"{name}{_PART}{recipe}" for name, recipe in recipes.items()) or NO_VIEW


def _from_table(name: str, table: object) -> Recipe:
    if isinstance(table, Recipe):
        return table
    if not isinstance(table, Mapping):
        raise ValueError(f"the view {name} is no table: write [views.{name}] with short_side and format below it")
    if unknown := sorted(str(key) for key in table if key not in Recipe._fields):
        raise ValueError(f"unknown key {unknown[0]} of the view {name}: a view has {', '.join(Recipe._fields)}")
    if missing := [key for key in ("format", "short_side") if key not in table]:
        raise ValueError(f"the view {name} has no {missing[0]}: write a line '{missing[0]} = ...' below [views.{name}]")
    return Recipe.checked(table["format"], table["short_side"], table.get("quality"))


def _whole(value: object, name: str, allowed: range) -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or number not in allowed:
        raise ValueError(f"{name} of a view must be a whole number from {allowed[0]} to {allowed[-1]}")
    return number


class Unmade(IntEnum):
    """Why a maker makes no view of a file, which is then shown as it is; `reason` is what the log says."""

    reason: str

    def __new__(cls, number: int, reason: str = "") -> Unmade:
        unmade = int.__new__(cls, number)
        unmade._value_, unmade.reason = number, reason
        return unmade

    NO_IMAGE = 1, "it is no image, or of a format that no view is made of"
    DAMAGED = 2, "its image is damaged or cut short"
    MODE = 3, "its image is neither 8-bit grey nor 8-bit RGB"
    PIXELS = 4, "its image has more pixels than view_megapixels allows"
    ORIENTATION = 5, "its image has an orientation for which a view of this format has no place"
    SMALL = 6, "its image is as small as the view, and of the same format"
    MEMORY = 7, "its image takes more memory than a maker may have"
    PICTURES = 8, "it is an animation, and a view is one image"


def request(length: int, recipe: Recipe) -> bytes:
    """The message that asks for a view of an original of `length` bytes."""
    return _REQUEST.pack(length, FORMATS.index(recipe.format), recipe.short_side, recipe.quality)


def parse_request(message: bytes) -> tuple[int, Recipe]:
    """The original's length, and the recipe."""
    length, kind, short_side, quality = _REQUEST.unpack(message)
    return length, Recipe(FORMATS[kind], short_side, quality)
