"""The tree of forms: which file of the source, in which form, lies at which path of a mount."""

from __future__ import annotations

import pytest

from benchmarks.fakes import MemorySource
from spiderfs.errors import SourceNotFound
from spiderfs.views.recipe import READY
from spiderfs.views.tree import Forms, TreeSource, ViewPlace


@pytest.mark.parametrize(
    ("shown", "path", "place"),
    [
        ("original", b"a/b", ViewPlace("original", b"", b"a/b")),
        ("bmp256", b"a/b", ViewPlace("bmp256", b"", b"a/b")),
        ("original", b".spiderfs/views/bmp256/a/b", ViewPlace("bmp256", b".spiderfs/views/bmp256", b"a/b")),
        ("original", b".spiderfs/views/bmp256", ViewPlace("bmp256", b".spiderfs/views/bmp256", b"")),
        ("bmp256", b".spiderfs/views/original/a", ViewPlace("original", b".spiderfs/views/original", b"a")),
        # What the root shows is the root's, by each of its two paths.
        ("bmp256", b".spiderfs/views/bmp256/a", ViewPlace("bmp256", b"", b"a")),
        ("original", b".spiderfs/views/original/a", ViewPlace("original", b"", b"a")),
        # The directories above show the attributes of the root, and nothing lies beside the forms.
        ("original", b".spiderfs/views", ViewPlace("original", b"", b"")),
        ("original", b".spiderfs", ViewPlace("original", b"", b"")),
        ("original", b".spiderfs/views/unknown/a", ViewPlace("original", b"", b".spiderfs/views/unknown/a")),
        ("original", b".spiderfs-packages/a", ViewPlace("original", b"", b".spiderfs-packages/a")),
        ("original", b".spiderfs/view/a", ViewPlace("original", b"", b".spiderfs/view/a")),
        ("original", b".spiderfs/views/\xff/a", ViewPlace("original", b"", b".spiderfs/views/\xff/a")),
    ],
)
def test_each_path_is_one_form_of_one_file(shown: str, path: bytes, place: ViewPlace) -> None:
    assert Forms(READY, shown).place(path) == place


def test_without_recipes_there_is_no_directory_of_views() -> None:
    forms = Forms()
    assert forms.names == []
    assert forms.roots == [b""]
    assert forms.place(b".spiderfs/views/bmp256/a").form == "original"


def test_the_directory_has_each_form_once() -> None:
    forms = Forms({"a": READY["bmp256"], "b": READY["png256"]}, "a")
    assert forms.names == [b"original", b"a", b"b"]
    assert forms.roots == [b"", b".spiderfs/views/original", b".spiderfs/views/b"]


def test_a_share_of_the_files_is_shown_as_views_by_their_paths() -> None:
    paths = [b"%d/%d.jpg" % (number % 7, number) for number in range(2_000)]

    def views(share: float) -> set[bytes]:
        forms = Forms(READY, "bmp256", share)
        places = [forms.place(path) for path in paths]
        assert all(place == ViewPlace(place.form, b"", path) for place, path in zip(places, paths, strict=True))
        return {place.path for place in places if place.form == "bmp256"}

    third, half = views(1 / 3), views(0.5)
    assert len(third) == pytest.approx(667, abs=60)
    # A larger share makes views of more files, and originals of none.
    assert third < half < views(1.0) == set(paths)
    assert views(0.0) == set()
    forms = Forms(READY, "bmp256", 0.5)
    assert forms.mixed
    assert forms.roots == [b"", *(b".spiderfs/views/" + name for name in forms.names)]
    for form in ("original", "bmp256"):
        root = b".spiderfs/views/" + form.encode()
        assert forms.place(root + b"/a") == ViewPlace(form, root, b"a")


def test_what_the_root_shows_is_told_apart() -> None:
    told = [Forms(READY, "bmp256", share).of_root for share in (0.0, 0.3, 0.30001, 1.0)]
    assert len(set(told)) == 4
    assert told[0] == Forms(READY).of_root == b""
    assert told[3] == Forms(READY, "bmp256").of_root


def test_a_fingerprint_is_found_out_once_or_known() -> None:
    asked = []

    def fingerprint(recipe: object) -> bytes:
        asked.append(recipe)
        return b"found"

    forms = Forms(READY, fingerprint=fingerprint)
    assert forms.fingerprint("original") == b""
    assert forms.known_fingerprint("bmp256") is None
    assert forms.fingerprint("bmp256", known=b"known") == b"known"
    assert [forms.fingerprint("png256"), forms.fingerprint("png256")] == [b"found"] * 2
    assert forms.known_fingerprint("png256") == b"found"
    assert asked == [READY["png256"]]


def test_names_and_originals_are_the_same_in_every_form() -> None:
    inner = MemorySource()
    version = inner.add(b"a/b", b"content").version
    source = TreeSource(inner, Forms(READY))
    for root in (b"", b".spiderfs/views/bmp256/", b".spiderfs/views/original/"):
        assert source.stat(root + b"a/b") == inner.stat(b"a/b")
        assert list(source.scan(root + b"a")) == list(inner.scan(b"a"))
        assert source.read(root + b"a/b", 1, 3, version) == b"ont"
    assert source.stat(b".spiderfs/views") == source.stat(b".spiderfs/views/bmp256") == inner.stat(b"")
    with pytest.raises(SourceNotFound):
        source.stat(b".spiderfs/views/unknown/a/b")
