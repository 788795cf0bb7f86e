"""Google's Cloud Storage: who asks, and what it has alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from object_server import ObjectServer, object_server

from spiderfs.errors import SourceError, SourceUnavailable
from spiderfs.sources.buckets import bucket
from spiderfs.sources.buckets.bucket import amazons_page
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import identity_of, open_source


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    # No one looks for a metadata server, or for what gcloud has left.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with object_server(dialect="gs") as made:
        made.objects["p/a"] = b"content"
        yield made


@pytest.fixture(scope="module")
def key() -> str:
    made = rsa.generate_private_key(65537, 2048)
    plain = serialization.NoEncryption()
    return made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()


@pytest.fixture
def account(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> Path:
    """The file of a service account."""
    file = tmp_path / "account.json"
    said = {
        "type": "service_account", "client_email": "training@project", "private_key_id": "1", "private_key": key,
        "token_uri": f"{server.url}/token", "project_id": "project",
    }  # fmt: skip
    file.write_text(json.dumps(said))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    return file


def read(server: ObjectServer, **settings: object) -> bytes:
    source = open_source("gs://bucket/p", StoreSettings(endpoint=server.url, **settings))
    return bytes(source.read(b"a", 0, 7, source.stat(b"a").version))


def test_a_service_account_asks(server: ObjectServer, account: Path) -> None:
    assert read(server) == b"content"
    assert server.asked() == ["POST /token", "LIST p/a", "GET p/a"]
    assert [headers["authorization"] for headers in server.headers] == ["Bearer TOKEN"] * 2
    assert server.headers[-1]["accept-encoding"] == "gzip", "what is packed comes as it was listed"


def test_a_refused_token_is_replaced(server: ObjectServer, account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "RECONNECT_S", 0.0)
    source = open_source("gs://bucket/p", StoreSettings(endpoint=server.url))
    version = source.stat(b"a").version
    server.token = "ANOTHER"
    server.fails = lambda request: None if "ANOTHER" in str(server.headers[-1]) else (401, "AuthenticationRequired")
    with pytest.raises(SourceUnavailable, match="renew them"):
        source.read(b"a", 0, 7, version)
    assert bytes(source.read(b"a", 0, 7, version)) == b"content"


def test_no_one_asks_in_a_public_bucket(server: ObjectServer, account: Path) -> None:
    assert read(server, anonymous=True) == b"content"
    assert server.asked() == ["LIST p/a", "GET p/a"]
    assert not any("authorization" in headers for headers in server.headers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"no credentials are found: set GOOGLE_APPLICATION_CREDENTIALS, .* source\.anonymous"),
        ("SECRET", "no credentials are found"),
        ('{"type": "service_account", "private_key": "SECRET"}', "no credentials are found|has failed"),
    ],
)
def test_credentials_that_cannot_be_used_are_told_without_what_they_say(
    server: ObjectServer, account: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    if text is None:
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    else:
        account.write_text(text)
    with pytest.raises(SourceUnavailable, match=said) as raised:
        read(server)
    assert "SECRET" not in repr(raised.value)


def test_a_refused_token_is_reported(server: ObjectServer, account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = server._server.RequestHandlerClass
    monkeypatch.setattr(
        handler, "do_POST", lambda self: self._answer(400, b'{"error": "invalid_grant", "secret": "SECRET"}', {})
    )
    with pytest.raises(SourceError, match="not accepted any more") as raised:
        read(server)
    assert "SECRET" not in repr(raised.value)


def test_keys_are_quoted_also_if_the_listing_does_not_say_so() -> None:
    row = "<Contents><Key>a%2Bb</Key><Size>1</Size><LastModified>2023-11-14T22:13:20.123Z</LastModified></Contents>"
    body = f"<ListBucketResult>{row}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
    assert [found.key for found in amazons_page(body, quoted=True).objects] == ["a+b"]
    assert [found.key for found in amazons_page(body).objects] == ["a%2Bb"]


def test_a_bucket_has_the_same_name_everywhere_but_at_an_endpoint() -> None:
    assert identity_of("gs://bucket/p/") == "gs://bucket/p"
    assert identity_of("gs://bucket/p", StoreSettings("http://host:1")) == "gs://bucket/p at http://host:1"
