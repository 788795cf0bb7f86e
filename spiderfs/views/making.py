"""Making a view of one image: a pure function of its bytes, the recipe and the installed libraries.

`python -m spiderfs.views.making` is the program of one maker: it makes views for the process that has started it.

The pixels are what Pillow's antialiased bilinear filter makes of the decoded image, whatever its colour profile and
EXIF orientation say. The orientation's tag is copied, and nothing else beside the pixels; formats that have no place
for it do not take such images, nor are images taken with an orientation outside of EXIF data, by which some readers go.
A JPEG is decoded at a half, a quarter or an eighth of its size (`draft`) if that leaves at least twice the view's size.

Images of other modes than 8-bit L and RGB, animations, files that are no images, and images that are as small and of
the same format already are left as they are (`Unmade`). For the same original the answer is always the same;
`fingerprint` stands for all that it depends on.
"""

from __future__ import annotations

import functools
import hashlib
import io
import mmap
import os
import resource
import struct
import sys
from typing import Any

from PIL import Image, ImageFile, UnidentifiedImageError, WebPImagePlugin

from spiderfs.linux.process_table import end_with_parent
from spiderfs.views.recipe import ANSWER, MADE, REQUEST_BYTES, Recipe, Unmade, parse_request

# A change of this module that makes other bytes gets a new number: views that were made before are then made again.
REVISION = 3
# Pillow reads more, but turns some by itself (TIFF) or shows one of several pictures (GIF). WebP's reader loads late.
_READ = ("JPEG", "PNG", "BMP", "PPM", WebPImagePlugin.WebPImageFile.format)
_SAME = {"jpeg": ("JPEG", "MPO"), "png": ("PNG",), "bmp": ("BMP",), "npy": ()}
_ORIENTATION, _UPRIGHT = 0x0112, 1
# The type that EXIF has for the orientation. Pillow reads other types too, and other readers take them for no turn.
_SHORT = 3
# Pillow loads a PNG that was cut short if all its rows are there; libpng's own readers refuse it.
_PNG_END = b"IEND\xaeB`\x82"
# EXIF's place in a file: JPEG has APP1, PNG the chunk eXIf; BMP and NPY have none.
_TAKES_ORIENTATION = ("jpeg", "png")
_MODES = ("L", "RGB")
# A PNG of 16 bits a colour is decoded so, to 8 bits; so is a PPM with larger numbers than this.
_DEEP_PNG, _LARGEST = "RGB;16B", 255
# Phones write several pictures into one JPEG (MPO); every reader shows the first.
_ANIMATED = ("PNG", WebPImagePlugin.WebPImageFile.format)
# Readers and the mount go first: nice(2) says that this is the lowest of 20 steps.
_NICE = 19
# Of the golden image, large enough that `draft` takes a part in it.
_GOLDEN_SIZE, _GOLDEN_SHORT_SIDE = (256, 192), 24

# Each image's header is checked against the mount's own limit; Pillow would only warn of up to twice its limit.
Image.MAX_IMAGE_PIXELS = None


def make(original: bytes, recipe: Recipe, most_pixels: int) -> bytes | Unmade:
    """The bytes of the view of an image file, or why there is none."""
    try:
        with Image.open(io.BytesIO(original), formats=_READ) as image:
            view = _made(image, recipe, most_pixels)
            cut_short = image.format == "PNG" and _PNG_END not in original
            return Unmade.DAMAGED if cut_short and isinstance(view, bytes) else view
    except UnidentifiedImageError:
        return Unmade.NO_IMAGE
    except MemoryError:
        return Unmade.MEMORY
    except Exception:
        # Pillow's readers raise errors of a dozen kinds for damaged files.
        return Unmade.DAMAGED


def _made(image: Image.Image, recipe: Recipe, most_pixels: int) -> bytes | Unmade:
    if image.width * image.height > most_pixels:
        return Unmade.PIXELS
    if image.mode not in _MODES or "transparency" in image.info or _is_deep(image):
        return Unmade.MODE
    if image.format in _ANIMATED and getattr(image, "is_animated", False):
        return Unmade.PICTURES
    kind, size = image.format, recipe.size_of(*image.size)
    if size == image.size and kind in _SAME[recipe.format]:
        return Unmade.SMALL
    seen_by_some = image.getexif().get(_ORIENTATION, _UPRIGHT)  # in XMP data, if not in EXIF data
    orientation = _exif_orientation(image)
    if seen_by_some != orientation or (orientation != _UPRIGHT and recipe.format not in _TAKES_ORIENTATION):
        return Unmade.ORIENTATION
    if size != image.size:
        image.draft(None, (2 * size[0], 2 * size[1]))
        image = image.resize(size, Image.Resampling.BILINEAR)
    image.load()  # whose last parts may bring something
    image.info = {}  # else a JPEG's comment and a PNG's colour profile would be copied
    return _saved(image, recipe, orientation)


def _is_deep(image: Image.Image) -> bool:
    """Whether the file has more than 8 bits for a colour: Pillow would keep 8 of them."""
    assert isinstance(image, ImageFile.ImageFile)
    for tile in image.tile:
        if image.format == "PNG" and tile.args == _DEEP_PNG:
            return True
        if tile.codec_name.startswith("ppm") and isinstance(tile.args, tuple) and tile.args[1] > _LARGEST:
            return True
    return False


def _exif_orientation(image: Image.Image) -> Any:
    """The orientation in the EXIF data; None if its type is not SHORT, because some readers then ignore it."""
    exif, content = Image.Exif(), image.info.get("exif", b"")
    exif.load(content)
    orientation = exif.get(_ORIENTATION, _UPRIGHT)
    entry = struct.pack(f"{exif.endian or '<'}HHL", _ORIENTATION, _SHORT, 1)
    return orientation if orientation == _UPRIGHT or entry in content else None


def _saved(image: Image.Image, recipe: Recipe, orientation: int) -> bytes:
    out = io.BytesIO()
    if recipe.format == "npy":
        return _numpy_head(image) + image.tobytes()
    if orientation != _UPRIGHT:
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        tag = {"exif": exif.tobytes()}
    else:
        tag = {}
    if recipe.format == "jpeg":
        image.save(out, "JPEG", quality=recipe.quality, **tag)
    elif recipe.format == "png":
        # Stored, not packed: unpacking takes a loader longer than decoding a JPEG.
        image.save(out, "PNG", compress_level=0, **tag)
    else:
        image.save(out, "BMP")
    return out.getvalue()


def _numpy_head(image: Image.Image) -> bytes:
    """What a file of numpy's begins with (numpy.lib.format, version 1.0); to import numpy takes a maker's memory."""
    shape = (image.height, image.width, 3) if image.mode == "RGB" else (image.height, image.width)
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def fingerprint(recipe: Recipe, most_pixels: int, longest_bytes: int) -> bytes:
    """16 letters that are others as soon as the views of some originals may be.

    A small image is made here and now, as a JPEG and from it by the recipe's format: so another version of a library
    that makes other bytes of it has another fingerprint, and its views are never mixed with those made before.
    """
    photo = _golden_photo(recipe.quality or 90)
    golden = make(photo, recipe._replace(short_side=_GOLDEN_SHORT_SIDE), _GOLDEN_SIZE[0] * _GOLDEN_SIZE[1])
    assert isinstance(golden, bytes)
    text = f"{recipe} {REVISION} {most_pixels} {longest_bytes}".encode()
    return hashlib.blake2b(text + photo + golden, digest_size=8).hexdigest().encode()


@functools.cache
def _golden_photo(quality: int) -> bytes:
    width, height = _GOLDEN_SIZE
    pixels = bytes(
        channel for y in range(height) for x in range(width) for channel in (x, (x * y) >> 8, (x * 7 + y * 13) & 255)
    )
    photo = make(b"P6 %d %d 255\n" % _GOLDEN_SIZE + pixels, Recipe("jpeg", height, quality), width * height)
    assert isinstance(photo, bytes)
    return photo


def main(arguments: list[str]) -> None:
    """Make views until the parent ends; the maker takes no more memory than it is given.

    `arguments`: the memory file's descriptor and length, address space in bytes, most pixels, parent. Original and view
    lie in the memory file. A request on standard input is the original's length and the recipe; an answer on standard
    output is a reason of `Unmade`, or 0, and the view's length.
    """
    memory_fd, slot_bytes, memory_bytes, most_pixels, parent = map(int, arguments)
    if not end_with_parent(parent):
        return
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = mmap.mmap(memory_fd, slot_bytes)
    while message := os.read(0, REQUEST_BYTES):
        length, recipe = parse_request(message)
        made = make(memory[:length], recipe, most_pixels)
        if isinstance(made, bytes) and len(made) > slot_bytes:
            made = Unmade.MEMORY
        if isinstance(made, bytes):
            memory[: len(made)] = made
            os.write(1, ANSWER.pack(MADE, len(made)))
        else:
            os.write(1, ANSWER.pack(made, 0))


if __name__ == "__main__":
    main(sys.argv[1:])
