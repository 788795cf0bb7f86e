"""Which keys are shown as which files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.errors import ConfigError, SourceNotFound
from spiderfs.sources.object_source import Place, is_name


@pytest.mark.parametrize(
    "part", ["a", "a b", "..a", "...", "é", "a%20b", "#?&+~*'()!\"<>\\{}^[]`|", "n" * 255, "é" * 127]
)
def test_most_parts_of_keys_are_names(part: str) -> None:
    assert is_name(part)


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "a\0", "a\n", "\x1f", "\x7f", "n" * 256, "é" * 128])
def test_others_are_not(part: str) -> None:
    assert not is_name(part)


@given(st.text(max_size=300))
def test_a_name_is_one_that_a_file_system_can_show(part: str) -> None:
    if is_name(part):
        encoded = part.encode(errors="surrogatepass")
        assert 0 < len(encoded) <= 255
        assert not {0, ord("/")} & set(encoded)


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://my.bucket-1/train", "my.bucket-1", "train/"),
        ("s3://bucket/a/b c/", "bucket", "a/b c/"),
        ("s3://Old_Bucket/a", "Old_Bucket", "a/"),
    ],
)
def test_a_url_names_bucket_and_prefix(url: str, bucket: str, prefix: str) -> None:
    assert Place.parse(url) == (bucket, prefix)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://buc ket/x", "names no bucket"),
        ("s3://bucket:9000/x", "names no bucket"),
        ("s3://bucket//x", "cannot be a path"),
        ("s3://bucket/a/../b", "cannot be a path"),
        ("s3://bucket/a//", "cannot be a path"),
    ],
)
def test_another_url_is_a_mistake(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Place.parse(url)


@pytest.mark.parametrize("url", ["s3://key:SECRET@bucket/x", "s3://bucket/x?X-Amz-Signature=SECRET", "s3://SECRET@"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="leave out what signs or logs in") as refused:
        Place.parse(url)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "path", [b"", b"a//b", b"/a", b"a/", b"..", b"a/../b", b"\xff", b"a\0", b"/".join([b"n" * 99] * 11)]
)
def test_other_paths_cannot_be_keys(path: bytes) -> None:
    with pytest.raises(SourceNotFound):
        Place("bucket", "p/").key(path)
