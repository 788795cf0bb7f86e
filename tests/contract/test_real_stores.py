"""Buckets of stores that others have written, for who has them installed (`tests/real_stores.py` says how)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import pytest
import requests
from moto_store import client_of
from obstore.store import AzureStore
from real_stores import KEY, SECRET, azurite, program, rclone, seaweedfs

from spiderfs.errors import SourceChanged, SourceNotFound, SourceUnavailable
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import OpenedSource, open_source
from spiderfs.sources.source import Version

pytestmark = pytest.mark.slow

# Azurite's one account, which everybody knows.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
ODD = "b+c d%20#?&é日本~*'()!"


class Store(NamedTuple):
    url: str
    scheme: str
    put: Callable[[str, bytes], object]
    delete: Callable[[str], object]
    has_ranges: bool = True

    def open(self, bucket: str = "bucket", **settings: Any) -> OpenedSource:
        return open_source(f"{self.scheme}://{bucket}/p", StoreSettings(endpoint=self.url, **settings))


def of_amazon(url: str, has_ranges: bool = True) -> Store:
    client = client_of(url, KEY, SECRET)
    client.create_bucket(Bucket="bucket")
    return Store(
        url,
        "s3",
        lambda key, content: client.put_object(Bucket="bucket", Key=key, Body=content),
        lambda key: client.delete_object(Bucket="bucket", Key=key),
        has_ranges,
    )


def of_microsoft(url: str) -> Store:
    url = f"{url}/{ACCOUNT}"
    headers = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2021-02-12"}
    said = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{said}/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    signature = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
    assert requests.put(f"{url}/bucket?restype=container", headers=headers, timeout=10).status_code == 201
    client: Any = {"allow_http": True}
    made = AzureStore("bucket", account_name=ACCOUNT, account_key=ACCOUNT_KEY, endpoint=url, client_options=client)
    return Store(url, "az", lambda key, content: obstore.put(made, key, content), lambda key: obstore.delete(made, key))


MAKERS: dict[str, Any] = {
    "weed": (seaweedfs, of_amazon),
    "rclone": (rclone, lambda url: of_amazon(url, has_ranges=False)),
    "azurite-blob": (azurite, of_microsoft),
}


@pytest.fixture(scope="module", params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    binary = program(request.param)
    assert binary is not None, f"{request.param} is not installed: `real_stores.py` says how"
    begin, make = MAKERS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AZURE_STORAGE_KEY", ACCOUNT_KEY)
        with begin(binary, Path(tmp_path_factory.mktemp("store"), "served")) as url:
            yield make(url)


def test_a_tree_is_walked_and_read(store: Store) -> None:
    keys = ["p/a", "p/d/b", "p/d/e/c", "p/z z", "p/a+b", "p/a%2Bb", f"p/{ODD}/{ODD}"]
    for key in keys:
        store.put(key, key.encode())
    source = store.open()
    found: dict[str, Version] = {}

    def walk(directory: bytes) -> None:
        for name, entry in list(source.scan(directory))[1:]:
            path = directory + b"/" + name if directory else name
            if stat.S_ISDIR(entry.mode):
                walk(path)
            else:
                assert source.stat(path) == entry, "a GET, a listing and a look-up tell the same"
                found[f"p/{path.decode()}"] = entry.version

    walk(b"")
    assert found.keys() >= set(keys)
    for key in keys:
        path, content = key.removeprefix("p/").encode(), key.encode()
        assert bytes(source.read(path, 0, len(content), found[key])) == content
        if store.has_ranges:
            assert bytes(source.read(path, 1, 2, found[key])) == content[1:3]
    if not store.has_ranges:
        with pytest.raises(SourceUnavailable, match="sample_max_bytes"):
            source.read(b"a", 1, 2, found["p/a"])


def test_a_listing_of_several_pages(store: Store) -> None:
    for number in range(30):
        store.put(f"p/many/{number:05}", b"x")
    source = store.open()
    source._bucket.page_keys = 7  # type: ignore[attr-defined]
    assert len(list(source.scan(b"many"))) == 31


def test_what_is_replaced_or_gone_is_noticed(store: Store) -> None:
    store.put("p/changing", b"old")
    source = store.open()
    version = source.stat(b"changing").version
    store.put("p/changing", b"newer")
    with pytest.raises(SourceChanged):
        source.read(b"changing", 0, 3, version)
    store.delete("p/changing")
    with pytest.raises(SourceNotFound):
        source.read(b"changing", 0, 3, version)
    with pytest.raises(SourceNotFound):
        source.stat(b"changing")


def test_another_bucket_is_none(store: Store) -> None:
    with pytest.raises(SourceUnavailable, match="there is no such bucket"):
        store.open("another").stat(b"")
