"""Microsoft's Blob Storage: which account is meant, who asks, and what it has alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import azure.identity
import pytest
from azure.core.exceptions import ClientAuthenticationError
from object_server import ObjectServer, object_server

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.buckets.bucket import microsofts_page
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import identity_of, open_source

KEY = base64.b64encode(b"SECRET-of-a-test").decode()
SAS = "sv=2023-11-03&sp=rl&sig=SECRET%2Bsignature"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    with object_server(dialect="az") as made:
        made.objects["p/a b"] = b"content"
        yield made


def read(url: str, **settings: object) -> bytes:
    source = open_source("az://bucket/p", StoreSettings(endpoint=url, **settings))
    return bytes(source.read(b"a b", 0, 7, source.stat(b"a b").version))


def signature(headers: dict[str, str], path: str, query: dict[str, str]) -> str:
    """The signature of a GET, as "Authorize with Shared Key" describes it."""
    plain = ["content-encoding", "content-language", "content-length", "content-md5", "content-type", "date"]
    plain += ["if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"]
    values = [headers.get(name, "") for name in plain]
    values[2] = "" if values[2] == "0" else values[2]
    named = [f"{name}:{headers[name]}" for name in sorted(headers) if name.startswith("x-ms-")]
    asked = [f"{name}:{value}" for name, value in sorted(query.items())]
    text = "\n".join(["GET", *values, *named, f"/account{path}", *asked])
    return base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()


def test_requests_are_signed_by_the_accounts_key(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    assert read(server.url) == b"content"
    assert server.asked() == ["LIST p/a b", "GET p/a b"]
    for headers, query, path in zip(server.headers, server.queries, ("/bucket", "/bucket/p/a%20b"), strict=True):
        assert headers["authorization"] == f"SharedKey account:{signature(headers, path, query)}"


def test_a_connection_string_says_all(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"BlobEndpoint={server.url};AccountName=account;AccountKey={KEY};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    assert read("") == b"content"
    assert all(headers["authorization"].startswith("SharedKey account:") for headers in server.headers)
    assert identity_of("az://bucket/p") == f"az://bucket/p at {server.url}"


@pytest.mark.parametrize("as_string", [False, True])
def test_a_shared_access_signature_asks(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, as_string: bool) -> None:
    if as_string:
        text = f"BlobEndpoint={server.url};SharedAccessSignature={SAS}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    else:
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"?{SAS}")
    assert read(server.url) == b"content"
    assert [query["sig"] for query in server.queries] == ["SECRET+signature"] * 2
    assert not any("authorization" in headers for headers in server.headers)
    server.fails = lambda request: (403, "AuthenticationFailed")
    with pytest.raises(SourceUnavailable) as raised:
        read(server.url)
    assert "SECRET" not in repr(raised.value)
    server.close()
    with pytest.raises(SourceUnavailable) as raised:
        read(server.url)
    assert "SECRET" not in repr(raised.value)


class Token(NamedTuple):
    token: str
    expires_on: float


class Credential:
    """In place of azure-identity's, which would ask the network."""

    says: Exception | None = None
    asked = 0

    def get_token(self, scope: str) -> Token:
        assert scope == "https://storage.azure.com/.default"
        Credential.asked += 1
        if self.says:
            raise self.says
        return Token("TOKEN", time.time() + 3600)


def test_an_identity_asks(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", Credential)
    monkeypatch.setattr(Credential, "asked", 0)
    assert read(server.url) == b"content"
    assert [headers["authorization"] for headers in server.headers] == ["Bearer TOKEN"] * 2
    assert Credential.asked == 1
    monkeypatch.setattr(Credential, "says", ClientAuthenticationError("SECRET"))
    with pytest.raises(SourceUnavailable, match=r"no credentials are found: set AZURE_.* 'az login'") as raised:
        read(server.url)
    assert "SECRET" not in repr(raised.value)


def test_no_one_asks_in_a_public_container(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    assert read(server.url, anonymous=True) == b"content"
    assert not any("authorization" in headers for headers in server.headers)


@pytest.mark.parametrize(
    ("variables", "endpoint", "account", "place"),
    [
        ({"AZURE_STORAGE_ACCOUNT": "one"}, "", "one", "https://one.blob.core.windows.net"),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "one"}, "", "one", "https://one.blob.core.windows.net"),
        ({}, "https://two.blob.core.windows.net", "two", "https://two.blob.core.windows.net"),
        ({"AZURE_STORAGE_ACCOUNT": "one"}, "https://two.blob.core.windows.net", "two", None),
        ({"AZURE_STORAGE_ACCOUNT": "one"}, "http://127.0.0.1:10000/devstoreaccount1", "devstoreaccount1", None),
        ({"AZURE_STORAGE_ACCOUNT": "one"}, "http://localhost:10000", "one", None),
        (
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=three;EndpointSuffix=core.chinacloudapi.cn"},
            "",
            "three",
            "https://three.blob.core.chinacloudapi.cn",
        ),
    ],
)
def test_the_account_is_found(
    server: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    endpoint: str,
    account: str,
    place: str | None,
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    source = open_source("az://c/p", StoreSettings(endpoint=endpoint))
    assert source._bucket._account() == account
    assert source.identity == f"az://c/p at {place or endpoint}"


def test_without_an_account_a_user_is_told_what_to_do(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(SourceUnavailable, match=r"no storage account is named: set source\.endpoint="):
        identity_of("az://c/p")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "SECRET!")
    with pytest.raises(SourceUnavailable, match="no key: check AZURE_STORAGE_KEY") as raised:
        read(server.url)
    assert "SECRET" not in repr(raised.value)


def test_directories_of_an_account_with_a_hierarchy_are_directories() -> None:
    times = "<Last-Modified>Tue, 14 Nov 2023 22:13:20 GMT</Last-Modified><Etag>0x1</Etag>"
    body = f"""<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="c"><Blobs>
    <Blob><Name>d</Name><Properties>{times}<ResourceType>directory</ResourceType><Content-Length>0</Content-Length>
    </Properties></Blob>
    <BlobPrefix><Name>e/</Name><Properties>{times}<Content-Length>0</Content-Length></Properties></BlobPrefix>
    <Blob><Name Encoded="true">f%01</Name><Properties>{times}<Content-Length>7</Content-Length></Properties></Blob>
    <Blob><Name>g%01</Name><Properties>{times}<Content-Length>8</Content-Length></Properties></Blob>
    </Blobs><NextMarker /></EnumerationResults>"""
    page = microsofts_page(body.encode())
    assert page.prefixes == ["d/", "e/"]
    assert [(found.key, found.size, found.e_tag) for found in page.objects] == [("f\x01", 7, "0x1"), ("g%01", 8, "0x1")]
    assert page.next_token is None
