"""Paths and globs as a person writes them."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spiderfs.daemon.caching.warmer import Pattern, Selection
from spiderfs.errors import ConfigError

MOUNT = b"/mnt/data"


@pytest.mark.parametrize(
    ("text", "path", "means"),
    [
        (b"train/cat.png", b"train/cat.png", True),
        (b"train/cat.png", b"train/cat.pngx", False),
        (b"train", b"train/a/b.png", True),
        (b"train/", b"train/a/b.png", True),
        (b"./train//a/.", b"train/a/b.png", True),
        (b"train", b"trainer/a.png", False),
        (b"train/*/0*.png", b"train/cat/01.png", True),
        (b"train/*/0*.png", b"train/cat/10.png", False),
        (b"train/*/0*.png", b"train/a/b/01.png", False),
        (b"*.png", b"a.png", True),
        (b"*.png", b"train/a.png", False),
        (b"**/*.png", b"a.png", True),
        (b"**/*.png", b"x/y/z/a.png", True),
        (b"x/**/a.png", b"x/a.png", True),
        (b"x/**/a.png", b"y/a.png", False),
        (b"**", b"anything/at/all", True),
        (b"x/**/**", b"x", True),
        (b"**/x", b"y", False),
        (b"", b"anything", True),
        (b"/", b"anything", True),
        (b"/mnt/data", b"anything", True),
        (b"/mnt/data/train", b"train/a", True),
        (b"  train/a ", b"train/a", False),
        (b"train/a ", b"train/a ", True),
        (b"[[]1].jpg", b"[1].jpg", True),
        (b"img[1].jpg", b"img1.jpg", True),
        (b"a\rb", b"a\rb", True),
        (b"[ab]?", b"b1", True),
        (b"[!ab]?", b"b1", False),
        (b"A", b"a", False),
        (b"caf\xe9*", b"caf\xe9-\xff", True),
        ("*é".encode(), "café".encode(), True),
    ],
)
def test_what_a_pattern_means(text: bytes, path: bytes, means: bool) -> None:
    assert Pattern(text, MOUNT).matches(path) is means


@pytest.mark.parametrize("text", [b"/mnt/data2/train", b"/nfs/data/train/*", b"/mnt", b"/train"])
def test_a_path_outside_of_the_mount_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text.decode())} lies outside of the mount at /mnt/data: write"):
        Pattern(text, MOUNT)


@pytest.mark.parametrize(
    ("text", "directory", "may"),
    [
        (b"train/*/a", b"", True),
        (b"train/*/a", b"train", True),
        (b"train/*/a", b"train/x", True),
        (b"train/*/a", b"test", False),
        (b"train", b"train/deep/down", True),
        (b"**/a", b"any/where", True),
        (b"x/**", b"y", False),
    ],
)
def test_where_a_walk_may_be_cut(text: bytes, directory: bytes, may: bool) -> None:
    assert Pattern(text, MOUNT).may_match_below(directory) is may


def test_a_pattern_of_many_stars_is_no_burden() -> None:
    """Tried part by part, this one would take longer than the universe has been there."""
    pattern = Pattern(b"**/a/" * 30 + b"b", MOUNT)
    path = b"/".join([b"a"] * 60)
    assert not pattern.matches(path)
    assert pattern.may_match_below(path)
    assert pattern.matches(path + b"/b")


def test_what_a_pattern_spells() -> None:
    assert Pattern(b"/mnt/data/./x//img[1].jpg/", MOUNT).path == b"x/img[1].jpg"
    assert [Pattern(text, MOUNT).is_glob for text in (b"a/b c", b"a*", b"a?", b"[a", b"a]")] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_a_selection_of_paths_and_globs() -> None:
    selection = Selection([b"a/b[1]", b"c"], [Pattern(b"d/*.png", MOUNT)])
    for path in (b"a/b[1]", b"a/b[1]/below", b"c/x/y", b"d/1.png"):
        assert path in selection
    for path in (b"a/b1", b"a", b"a/b[1]2", b"d/e/1.png", b"d"):
        assert path not in selection
    assert [selection.may_have_below(path) for path in (b"", b"a", b"a/b[1]/x", b"a/b1", b"c/d", b"d", b"e")] == [
        True,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert b"any" in Selection([b""], [])


@pytest.mark.parametrize("text", [b"/", MOUNT, MOUNT + b"/.spiderfs/views/small"])
def test_the_root_does_not_mean_its_files_in_other_forms(text: bytes) -> None:
    selection = Selection([Pattern(text, MOUNT, "small").path], [])
    for path in (b"a/b", b".spiderfsx/a"):
        assert path in selection
        assert selection.may_have_below(path)
    assert b".spiderfs/views/other/a" not in selection
    assert not selection.may_have_below(b".spiderfs/views/other")
    selection = Selection([b".spiderfs/views/other"], [])
    assert b".spiderfs/views/other/a" in selection
    assert selection.may_have_below(b".spiderfs/views/other")
    assert not selection.may_have_below(b"")


PART = st.sampled_from([b"a", b"b", b"ab", b"a*", b"*", b"?", b"[ab]", b"**"])
NAME = st.sampled_from([b"a", b"b", b"ab", b"ba", b"c", b"\xff"])
GLOBS = {b"a*": b"a[^/]*", b"*": b"[^/]*", b"?": b"[^/]", b"[ab]": b"[ab]"}


def as_expression(parts: list[bytes]) -> bytes:
    """The same pattern as a regular expression over names that each end with a slash."""
    pieces = [b"(?:[^/]+/)*" if part == b"**" else GLOBS.get(part, part) + b"/" for part in parts]
    # What is left of the path lies below the directory that the pattern means; `**` at the end means all of it.
    return b"".join(pieces) + b"(?:[^/]+/)*"


@given(parts=st.lists(PART, min_size=1, max_size=5), names=st.lists(NAME, min_size=1, max_size=6))
def test_a_pattern_means_what_the_same_regular_expression_means(parts: list[bytes], names: list[bytes]) -> None:
    pattern = Pattern(b"/".join(parts), MOUNT)
    path = b"/".join(names)
    matches = re.fullmatch(as_expression(parts), path + b"/", re.DOTALL) is not None
    assert pattern.matches(path) is matches
    if matches:
        # A walk that is pruned by it gets there.
        assert all(pattern.may_match_below(b"/".join(names[:depth])) for depth in range(len(names)))
        assert pattern.matches(path + b"/below")


@given(text=st.binary(max_size=20), path=st.binary(min_size=1, max_size=20))
def test_any_bytes_can_be_a_pattern(text: bytes, path: bytes) -> None:
    pattern = Pattern(MOUNT + text if text.startswith(b"/") else text, MOUNT)
    pattern.matches(path)
    pattern.may_match_below(path)
