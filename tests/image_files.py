"""Image files that tests make views of."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

from PIL import Image


def picture(width: int = 400, height: int = 300, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth picture, as photographs are: noise would be another picture after JPEG."""
    rng = random.Random(seed)
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = Image.frombytes(mode, (8, 8), rng.randbytes(64 * bands))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def image_file(form: str = "JPEG", *, orientation: int = 1, image: Image.Image | None = None, **options: Any) -> bytes:
    image = picture() if image is None else image
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif.tobytes()
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def plain_png(width: int, height: int, rows: bytes, bits: int = 8) -> bytes:
    """A PNG of these uncompressed rows, which need not be all that its header names."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
