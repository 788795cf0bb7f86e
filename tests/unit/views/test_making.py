"""Making views: which files have one, and what readers find in it."""

from __future__ import annotations

import io
import itertools
import random
import struct

import numpy as np
import pytest
from image_files import image_file, opened, picture, plain_png
from PIL import Image

from spiderfs.views.making import fingerprint, make
from spiderfs.views.recipe import READY, Recipe, Unmade

MOST = 1_000_000
SMALL = {form: Recipe(form, 64, 90 if form == "jpeg" else 0) for form in ("jpeg", "bmp", "png", "npy")}


def made(original: bytes, form: str = "jpeg") -> bytes:
    view = make(original, SMALL[form], MOST)
    assert isinstance(view, bytes), view
    return view


def pixels(view: bytes, form: str) -> np.ndarray:
    return np.load(io.BytesIO(view)) if form == "npy" else np.asarray(opened(view))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("original", ["JPEG", "PNG", "BMP", "PPM", "WEBP"])
def test_a_view_is_the_image_made_smaller(original: str, form: str, mode: str) -> None:
    image = picture(400, 300, mode)
    content = image_file(original, image=image, **({"quality": 95} if original in ("JPEG", "WEBP") else {}))
    mode = opened(content).mode  # WebP knows no grey
    best = np.asarray(opened(content).resize((85, 64), Image.Resampling.LANCZOS), np.float64)
    found = pixels(made(content, form), form)
    assert found.dtype == np.uint8
    assert found.shape == ((64, 85) if mode == "L" else (64, 85, 3))
    assert np.sqrt(np.mean((found - best) ** 2)) < 4


@pytest.mark.parametrize("form", SMALL)
def test_the_same_original_makes_the_same_bytes(form: str) -> None:
    content = image_file()
    assert made(content, form) == made(content, form)


@pytest.mark.parametrize("form", SMALL)
def test_each_reader_turns_a_view_as_it_turned_the_original(form: str) -> None:
    for orientation in (1, 3, 6, 8):
        view = make(image_file(orientation=orientation), SMALL[form], MOST)
        if orientation != 1 and form in ("bmp", "npy"):
            assert view is Unmade.ORIENTATION
        elif form != "npy":
            assert isinstance(view, bytes)
            assert opened(view).size == (85, 64)
            assert opened(view).getexif().get(0x0112, 1) == orientation


@pytest.mark.parametrize("form", SMALL)
def test_an_orientation_that_some_readers_do_not_see_leaves_the_image_as_it_is(form: str) -> None:
    """Pillow turns by XMP data where EXIF data say nothing; others know EXIF alone."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert make(image_file(xmp=xmp), SMALL[form], MOST) is Unmade.ORIENTATION
    assert isinstance(make(image_file(xmp=xmp.replace(b"6", b"1")), SMALL[form], MOST), bytes)
    if form in ("jpeg", "png"):
        # Where both have one, all readers go by that of EXIF.
        assert opened(made(image_file(xmp=xmp, orientation=3), form)).getexif()[0x0112] == 3


@pytest.mark.parametrize(("kind", "form"), [(3, "HH"), (4, "L"), (1, "BBH"), (9, "l")])
def test_an_odd_type_of_orientation_leaves_the_image_alone(kind: int, form: str) -> None:
    """Pillow reads a LONG, and a reader that takes two bytes of a big-endian one finds 0: no turn."""
    for (endian, magic), orientation in itertools.product((("<", b"II*\0"), (">", b"MM\0*")), (1, 6)):
        values = (orientation,) + (0,) * (len(form) - 1)
        entry = struct.pack(f"{endian}LHHHL{form}L", 8, 1, 0x0112, kind, 1, *values, 0)
        view = make(image_file(exif=b"Exif\0\0" + magic + entry), SMALL["jpeg"], MOST)
        if kind == 3:
            assert isinstance(view, bytes)
            assert opened(view).getexif().get(0x0112, 1) == orientation
        elif orientation == 6:
            assert view is Unmade.ORIENTATION


@pytest.mark.parametrize("form", SMALL)
def test_a_png_without_its_end_has_no_view(form: str) -> None:
    """Pillow loads it; readers that go by libpng do not."""
    content = image_file("PNG")
    assert {make(content[:-missing], SMALL[form], MOST) for missing in (4, 8, 12, 13, 20)} == {Unmade.DAMAGED}
    assert make(content + b"more", SMALL[form], MOST) == make(content, SMALL[form], MOST)


@pytest.mark.parametrize("size", [(400, 300), (60, 50)])
@pytest.mark.parametrize("form", SMALL)
def test_nothing_but_pixels_and_the_orientation_is_in_a_view(form: str, size: tuple[int, int]) -> None:
    image = picture(*size)
    beside = {"icc_profile": b"a profile" * 100, "dpi": (300, 300)}
    original, other = ("WEBP", "PNG") if form == "jpeg" else ("JPEG", "JPEG")
    content = image_file(original, image=image, lossless=True, **({"comment": b"words" * 1000, **beside}))
    assert made(content, form) == made(image_file(original, image=image, lossless=True), form)
    assert made(image_file(other, image=picture(), comment=b"words"), form) == made(image_file(other), form)


MORE: dict[str, object] = {"save_all": True, "append_images": [picture(seed=1)]}
WITHOUT_A_VIEW = {
    **{mode: (image_file("PNG", image=Image.new(mode, (400, 300))), Unmade.MODE) for mode in ("RGBA", "P", "1", "LA")},
    "I;16": (image_file("PNG", image=Image.new("I;16", (400, 300))), Unmade.MODE),
    "CMYK": (image_file(image=Image.new("CMYK", (400, 300))), Unmade.MODE),
    "a transparent colour": (image_file("PNG", transparency=(1, 2, 3)), Unmade.MODE),
    # Pillow opens those of sixteen bits a colour as if they had eight.
    "16 bits of PNG": (plain_png(200, 100, bytes((1 + 6 * 200) * 100), 16), Unmade.MODE),
    "16 bits of PPM": (b"P6 200 100 65535\n" + bytes(120_000), Unmade.MODE),
    "10 bits of PPM": (b"P6 200 100 1000\n" + bytes(120_000), Unmade.MODE),
    "16 bits of plain PPM": (b"P3 200 100 65535\n" + b"60000 " * 60_000, Unmade.MODE),
    **{f"animation of {form}": (image_file(form, **MORE), Unmade.PICTURES) for form in ("PNG", "WEBP")},
    # The header alone says that it is too large.
    "bomb": (plain_png(60_000, 60_000, bytes(1 << 20)), Unmade.PIXELS),
}


@pytest.mark.parametrize(("content", "reason"), WITHOUT_A_VIEW.values(), ids=WITHOUT_A_VIEW)
def test_what_readers_would_see_otherwise_has_no_view(content: bytes, reason: Unmade) -> None:
    assert make(content, SMALL["jpeg"], MOST) is reason


def test_seven_bits_a_colour_have_a_view() -> None:
    assert isinstance(make(b"P6 200 100 100\n" + bytes(60_000), SMALL["jpeg"], MOST), bytes)


@pytest.mark.parametrize("content", [b"", b"a text", bytes(1000), b"\xff\xd8\xff"])
def test_what_is_no_image_has_no_view(content: bytes) -> None:
    assert make(content, SMALL["jpeg"], MOST) in (Unmade.NO_IMAGE, Unmade.DAMAGED)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "PPM", "WEBP"])
def test_an_image_that_is_cut_short_has_no_view(form: str) -> None:
    content = image_file(form)
    for share in (0.5, 0.9):
        cut = make(content[: int(len(content) * share)], SMALL["jpeg"], MOST)
        assert cut in (Unmade.DAMAGED, Unmade.NO_IMAGE)


@pytest.mark.parametrize(("original", "form"), [("JPEG", "jpeg"), ("PNG", "png"), ("BMP", "bmp")])
def test_an_image_that_is_small_already_is_not_made_worse(original: str, form: str) -> None:
    assert make(image_file(original, image=picture(80, 60)), SMALL[form], MOST) is Unmade.SMALL
    other = make(image_file("PPM", image=picture(80, 60)), SMALL[form], MOST)
    assert isinstance(other, bytes)
    assert opened(other).size == (80, 60)


def test_a_damaged_image_never_raises() -> None:
    rng = random.Random(1)
    for form in ("JPEG", "PNG", "BMP", "WEBP"):
        content = image_file(form, image=picture(90, 70))
        for _ in range(50):
            spoiled = bytearray(content)
            for _ in range(rng.randrange(1, 20)):
                spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
            view = make(bytes(spoiled), SMALL["jpeg"], MOST)
            assert isinstance(view, bytes | Unmade)


def test_every_reason_has_its_words() -> None:
    assert all(unmade.reason for unmade in Unmade)


def test_the_fingerprint_is_another_one_for_everything_that_bytes_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = {fingerprint(recipe, MOST, 1 << 20) for recipe in READY.values()}
    assert len(prints) == len(READY)
    recipe = READY["jpeg256"]
    known = fingerprint(recipe, MOST, 1 << 20)
    assert known == fingerprint(recipe, MOST, 1 << 20)
    assert known not in (fingerprint(recipe, MOST + 1, 1 << 20), fingerprint(recipe, MOST, 1 << 21))
    # A library that makes other bytes.
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.draft", lambda *_: None)
    assert fingerprint(recipe, MOST, 1 << 20) != known
