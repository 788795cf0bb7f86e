"""A source that shows views: what is read by which path, and what remains true while makers fail."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from image_files import image_file, picture

from benchmarks.fakes import MemorySource
from spiderfs.errors import SourceChanged, ViewFailed
from spiderfs.sources.source import FromPeer, Version
from spiderfs.views.making import make
from spiderfs.views.recipe import Recipe, Unmade
from spiderfs.views.tree import Forms, MakerLost, ViewSource, unknown_length

RECIPE, TINY = Recipe("jpeg", 64, 90), Recipe("bmp", 32)
LONGEST = 1 << 20
UNKNOWN = unknown_length(LONGEST)


class Makers:
    """Makers in this process; `lost` of them die first."""

    def __init__(self) -> None:
        self.lost = 0
        self.answer: bytes | Unmade | None = None

    def make(self, original: bytes, recipe: Recipe) -> bytes | Unmade:
        if self.lost:
            self.lost -= 1
            raise MakerLost("its maker died")
        return make(original, recipe, 10**6) if self.answer is None else self.answer

    def close(self) -> None:
        pass


class Subject:
    def __init__(self) -> None:
        self.inner, self.makers, self.counted = MemorySource(), Makers(), Counter[str]()
        self.source = ViewSource(self.inner, Forms({"small": RECIPE, "tiny": TINY}), self.makers, LONGEST, self._count)
        self.content = image_file()
        self.version = self.inner.add(b"a/photo.jpg", self.content).version

    def _count(self, name: str) -> None:
        self.counted[name] += 1

    def view(
        self, length: int = UNKNOWN, path: bytes = b"a/photo.jpg", version: Version | None = None, form: str = "small"
    ) -> bytes:
        return self.source.read(b".spiderfs/views/%s/%s" % (form.encode(), path), 0, length, version or self.version)


@pytest.fixture
def subject() -> Subject:
    return Subject()


def test_a_file_and_its_view_are_two(subject: Subject) -> None:
    size = len(subject.content)
    assert subject.source.read(b"a/photo.jpg", 0, size, subject.version) == subject.content
    view = subject.view()
    assert view == make(subject.content, RECIPE, 10**6)
    assert subject.view(len(view)) == view
    assert subject.counted == {"views_made": 2}


def test_a_view_of_what_a_peer_gave_is_from_the_peer(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the source had to give is counted by that."""
    assert not isinstance(subject.view(), FromPeer)
    monkeypatch.setattr(subject.inner, "read", lambda *of: FromPeer(subject.content))
    view = subject.view()
    assert isinstance(view, FromPeer)
    assert view == make(subject.content, RECIPE, 10**6)


def test_another_version_has_no_view_here(subject: Subject) -> None:
    subject.inner.change(b"a/photo.jpg", image_file(image=picture(seed=1)))
    with pytest.raises(SourceChanged):
        subject.view()


def test_a_file_without_a_view_is_shown_and_named_once(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in (b"one.txt", b"two.txt"):
        version = subject.inner.add(name, b"text").version
        assert subject.view(UNKNOWN, name, version) == b"text"
        assert subject.view(len(b"text"), name, version) == b"text"
    assert subject.counted == {"views_as_they_are": 2}
    assert [record.message for record in caplog.records] == [
        "one.txt is shown as it is: it is no image, or of a format that no view is made of"
        " (said once; the metrics count the others)"
    ]


@pytest.mark.parametrize("view", [bytes(LONGEST + 1), None])
def test_a_view_of_an_odd_length_is_not_shown(subject: Subject, view: bytes | None) -> None:
    subject.makers.answer = bytes(len(subject.content)) if view is None else view
    assert subject.view() == subject.content


def test_while_makers_fail_all_get_the_original(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    subject.makers.lost = 1
    first = subject.view()
    assert first == subject.content
    assert subject.view(len(first)) == first
    assert subject.counted == {"view_makers_lost": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_who_knows_the_length_of_a_view_gets_no_other_bytes(subject: Subject) -> None:
    length = len(subject.view())
    subject.makers.lost = 1
    with pytest.raises(ViewFailed, match="cannot be made now"):
        subject.view(length)
    subject.makers.answer = Unmade.MEMORY
    with pytest.raises(ViewFailed, match="now there is none"):
        subject.view(length)
    subject.makers.answer = b"other bytes"
    with pytest.raises(ViewFailed, match="has 11 bytes now"):
        subject.view(length)
    subject.makers.answer = None
    assert len(subject.view(length)) == length


def test_each_view_is_made_by_its_own_recipe(subject: Subject) -> None:
    assert subject.view(form="small") == make(subject.content, RECIPE, 10**6)
    assert subject.view(form="tiny") == make(subject.content, TINY, 10**6)
    assert subject.view(form="original") == subject.content


def test_of_a_large_file_pieces_of_the_original_can_be_read(subject: Subject) -> None:
    version = subject.inner.add(b"large", bytes(LONGEST) + b"end").version
    path = b".spiderfs/views/small/large"
    assert subject.source.read(path, LONGEST - 1, 4, version) == b"\0end"
    assert subject.source.read(path, 0, 4, version) == bytes(4)
    assert subject.counted == {}


def test_a_file_as_long_as_a_file_with_a_view_may_be_has_one(subject: Subject) -> None:
    content = subject.content + bytes(LONGEST - len(subject.content))
    version = subject.inner.add(b"longest.jpg", content).version
    assert subject.view(UNKNOWN, b"longest.jpg", version) == make(subject.content, RECIPE, 10**6)
