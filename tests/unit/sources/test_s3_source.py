"""A bucket as a source: what is asked, what errors mean, and what is never said."""

from __future__ import annotations

import datetime
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from object_server import ObjectServer, object_server

from spiderfs.errors import (
    ConfigError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.sources import s3, s3_bucket
from spiderfs.sources.s3 import S3Source
from spiderfs.sources.s3_bucket import StoreSettings

SECRET, TOKEN = "SECRET-of-a-test", "TOKEN-of-a-test"
ODD = "b+c d%20#?&é日本~*'()!\"<>\\{}^[]`|"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with object_server() as made:
        yield made


@pytest.fixture
def source(server: ObjectServer) -> S3Source:
    return opened(server)


def opened(server: ObjectServer, url: str = "s3://bucket/p", **settings: object) -> S3Source:
    return S3Source(url, StoreSettings(endpoint=server.url, **settings))


def put(server: ObjectServer, *keys: str) -> None:
    server.objects.update({key: key.encode() for key in keys})


def listed(source: S3Source, path: bytes = b"") -> dict[str, str]:
    """The entries of a directory: `d` for directories, `f` for files."""
    (own, _), *entries = source.scan(path)
    assert own == b"."
    found = {name.decode(): "d" if stat.S_ISDIR(entry.mode) else "f" for name, entry in entries}
    assert len(found) == len(entries)
    return found


# -- names


def test_keys_below_the_prefix_are_a_tree(server: ObjectServer, source: S3Source) -> None:
    put(server, "p/a.jpg", "p/d/b.jpg", "p/d/e/c.jpg", "q/other", "p2/other", "p")
    assert listed(source) == {"a.jpg": "f", "d": "d"}
    assert listed(source, b"d") == {"b.jpg": "f", "e": "d"}
    assert stat.S_ISDIR(source.stat(b"d/e").mode)
    found = source.stat(b"d/e/c.jpg")
    assert (found.size, found.mode, found.mtime_ns) == (11, stat.S_IFREG | 0o444, 1_700_000_000 * 10**9)


def test_a_directory_hides_an_object_of_its_name(server: ObjectServer, source: S3Source) -> None:
    put(server, "p/d", "p/d/x")
    assert listed(source) == {"d": "d"}
    assert stat.S_ISDIR(source.stat(b"d").mode)


def test_an_object_whose_key_ends_with_a_slash_is_an_empty_directory(server: ObjectServer, source: S3Source) -> None:
    put(server, "p/d/", "p/e/", "p/e/x")
    assert listed(source) == {"d": "d", "e": "d"}
    assert listed(source, b"d") == {}
    assert listed(source, b"e") == {"x": "f"}
    assert stat.S_ISDIR(source.stat(b"d").mode)


def test_keys_that_cannot_be_names_are_left_out_and_said_once(
    server: ObjectServer, source: S3Source, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, "p/a", "p//lead", "p/d/b", "p/d//x", "p/d/../y", "p/d/bad\x01", "p/d/" + "n" * 256)
    assert listed(source) == {"a": "f", "d": "d"}
    assert listed(source, b"d") == listed(source, b"d") == {"b": "f"}
    assert [record.getMessage() for record in caplog.records] == [
        "1 key(s) below the prefix cannot be names of files and are not shown, for example 'p//'",
        "4 key(s) below d cannot be names of files and are not shown, for example 'p/d/bad\\x01'",
    ]


def test_any_other_key_can_be_read(server: ObjectServer, source: S3Source) -> None:
    put(server, f"p/{ODD}/{ODD}", "p/..a", "p/ ", "p/a+b", "p/a b", "p/a%2Bb")
    assert listed(source) == dict.fromkeys(["..a", " ", "a+b", "a b", "a%2Bb"], "f") | {ODD: "d"}
    for key, content in server.objects.items():
        path = key.removeprefix("p/").encode()
        assert bytes(source.read(path, 0, len(content), source.stat(path).version)) == content


def test_a_listing_has_many_pages(server: ObjectServer, source: S3Source) -> None:
    put(server, *(f"p/{number:04}{slash}" for number in range(25) for slash in ("", "/x")))
    server.page_keys = 4
    assert listed(source) == {f"{number:04}": "d" for number in range(25)}
    assert len(server.asked("LIST p/")) == 13


def test_a_later_page_of_a_listing_is_asked_for_again(
    server: ObjectServer, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever repeats a listing begins anew: one of many pages would never be had from a store that fails at times."""
    monkeypatch.setattr(s3, "_PAGE_PAUSES_S", (0.0, 0.0))
    put(server, *(f"p/{number:04}" for number in range(25)))
    server.page_keys = 4
    failures = iter([(503, "SlowDown"), (500, "InternalError")] * 6)
    server.fails = lambda request: next(failures, None) if len(server.requests) % 3 else None
    server.requests = ["so that the first page is answered", "and the next ones are not"]
    assert len(listed(source)) == 25
    assert len(server.asked("LIST p/")) > 10
    server.fails = lambda request: None if len(server.requests) == 1 else (503, "SlowDown")
    with pytest.raises(SourceThrottled):
        listed(source)
    assert len(server.asked("LIST p/")) == 4


def test_a_name_that_many_keys_begin_with_takes_one_more_request(server: ObjectServer, source: S3Source) -> None:
    put(
        server, *(f"p/d-{number}" for number in range(500)), "p/d/x", "p/f", *(f"p/f-{number}" for number in range(500))
    )
    server.asked()
    assert stat.S_ISDIR(source.stat(b"d").mode)
    assert server.asked() == ["LIST p/d", "LIST p/d/"]
    assert source.stat(b"f").size == 3
    assert server.asked() == ["LIST p/f", "LIST p/f/"]
    assert stat.S_ISREG(source.stat(b"f-1").mode)
    assert server.asked() == ["LIST p/f-1", "LIST p/f-1/"]
    with pytest.raises(SourceNotFound):
        source.stat(b"f-499x")
    assert server.asked() == ["LIST p/f-499x"]


def test_a_prefix_without_objects_is_said_to_be_empty(server: ObjectServer, source: S3Source) -> None:
    put(server, "q/x")
    with pytest.raises(SourceNotFound, match="s3://bucket/p holds no objects: check the prefix"):
        source.stat(b"")
    assert listed(source) == {}


def test_a_bucket_may_be_shown_as_a_whole(server: ObjectServer) -> None:
    put(server, "a", "d/b", "/lead")
    source = opened(server, "s3://bucket")
    assert listed(source) == {"a": "f", "d": "d"}
    assert bytes(source.read(b"d/b", 0, 3, source.stat(b"d/b").version)) == b"d/b"


# -- bytes


def test_an_object_is_read_by_one_request(server: ObjectServer, source: S3Source) -> None:
    server.objects["p/a"] = bytes(range(100))
    version = source.stat(b"a").version
    server.asked()
    assert bytes(source.read(b"a", 0, 100, version)) == bytes(range(100))
    assert bytes(source.read(b"a", 10, 20, version)) == bytes(range(10, 30))
    assert bytes(source.read(b"a", 90, 20, version)) == bytes(range(90, 100))
    assert server.asked() == ["GET p/a"] * 3
    assert [headers.get("range") for headers in server.headers[-3:]] == [None, "bytes=10-29", "bytes=90-99"]


def test_an_object_that_was_replaced_since_the_listing_is_another_version(
    server: ObjectServer, source: S3Source
) -> None:
    server.objects["p/a"] = b"old"
    ((_, found),) = list(source.scan(b""))[1:]
    server.objects["p/a"] = b"new"
    with pytest.raises(SourceChanged):
        source.read(b"a", 0, 3, found.version)
    server.objects["p/a"] = b"x"
    with pytest.raises(SourceChanged):
        source.read(b"a", 1, 2, found.version)
    del server.objects["p/a"]
    with pytest.raises(SourceNotFound):
        source.read(b"a", 0, 3, found.version)


def test_an_answer_that_breaks_off_is_no_content(server: ObjectServer, source: S3Source) -> None:
    server.objects["p/a"] = bytes(1000)
    version = source.stat(b"a").version
    server.cuts = {"p/a"}
    with pytest.raises(SourceUnavailable):
        source.read(b"a", 0, 1000, version)
    with pytest.raises(SourceUnavailable):
        source.read_present(b"a", 1000)


def test_tags_are_of_unquoted_etags() -> None:
    from spiderfs.sources.s3 import _tag

    assert _tag('"abc"') == _tag("abc") != _tag('W/"abc"')
    assert 0 < _tag("abc") < 1 << 64
    assert _tag("") == _tag('""') == 0


# -- errors


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (404, "NoSuchBucket", SourceUnavailable, "no such bucket: check its name"),
        (404, "", SourceUnavailable, "404"),
        (500, "InternalError", SourceUnavailable, "InternalError"),
        (503, "SlowDown", SourceThrottled, "SlowDown"),
        (503, "", SourceThrottled, "503"),
        (429, "TooManyRequests", SourceThrottled, "TooManyRequests"),
        (403, "AccessDenied", SourceDenied, "allow s3:ListBucket and s3:GetObject"),
        (403, "InvalidObjectState", SourceDenied, "restore it first"),
        (400, "ExpiredToken", SourceUnavailable, "renew them"),
        (403, "InvalidAccessKeyId", SourceUnavailable, "renew them"),
        (403, "SignatureDoesNotMatch", SourceUnavailable, "renew them"),
        (403, "RequestTimeTooSkewed", SourceUnavailable, "clock is wrong"),
        (400, "AuthorizationHeaderMalformed", SourceUnavailable, "set source.region"),
        (301, "PermanentRedirect", SourceUnavailable, ""),
    ],
)
def test_errors_are_told_apart(
    server: ObjectServer, source: S3Source, status: int, code: str, kind: type[SourceError], said: str
) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    server.fails = lambda request: (status, code)
    for ask in (lambda: source.read(b"a", 0, 3, version), lambda: source.stat(b"a"), lambda: list(source.scan(b""))):
        with pytest.raises(kind) as raised:
            ask()
        assert type(raised.value) is kind
        assert said in str(raised.value)
        for hidden in ("SECRET", "KEY", "Error>"):
            assert hidden not in repr(raised.value)
        assert raised.value.__suppress_context__


def test_only_the_store_says_that_an_object_is_gone(server: ObjectServer, source: S3Source) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    server.fails = lambda request: (404, "NoSuchKey")
    with pytest.raises(SourceNotFound):
        source.read(b"a", 0, 3, version)
    with pytest.raises(SourceUnavailable):
        source.stat(b"a")
    with pytest.raises(SourceUnavailable):
        list(source.scan(b""))


@pytest.mark.parametrize("body", [b"", b"<html>no", b"<html></html>", b"<ListBucketResult>", b"\xff"])
def test_a_listing_that_cannot_be_read_is_no_listing(
    server: ObjectServer, source: S3Source, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "listing", lambda query: body)
    with pytest.raises(SourceUnavailable, match=r"listing that cannot be read|has failed \(500\)"):
        source.stat(b"")


def test_a_store_that_is_not_there_or_slow_is_said_so(server: ObjectServer) -> None:
    put(server, "p/a")
    with pytest.raises(SourceUnavailable, match="cannot be reached: check"):
        S3Source("s3://bucket", StoreSettings(endpoint="http://127.0.0.1:1")).stat(b"")
    source = opened(server, timeout_s=0.2)
    version = source.stat(b"a").version
    server.latency_s = 0.6
    with pytest.raises(SourceUnavailable, match="has not answered"):
        source.read(b"a", 0, 3, version)
    with pytest.raises(SourceUnavailable, match="not answered in time"):
        source.stat(b"a")


def test_a_page_of_html_is_no_answer_of_the_store(
    server: ObjectServer, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something in front of the store refuses; what it sends can be read as XML."""
    put(server, "p/a")
    handler = server._server.RequestHandlerClass
    monkeypatch.setattr(
        handler, "_fail", lambda self, status, code: self._answer(status, b"<html><body>no</body></html>", {})
    )
    for status, kind in ((403, SourceDenied), (404, SourceUnavailable), (503, SourceThrottled)):
        server.fails = lambda request, status=status: (status, "")
        with pytest.raises(kind, match=str(status)):
            source.stat(b"a")


def test_redirects_without_end_are_an_error(
    server: ObjectServer, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    handler = server._server.RequestHandlerClass
    for method in ("do_GET", "do_HEAD"):
        monkeypatch.setattr(handler, method, lambda self: self._answer(302, b"", {"Location": server.url + self.path}))
    with pytest.raises(SourceUnavailable, match="redirects requests without end"):
        source.stat(b"a")
    with pytest.raises(SourceUnavailable):
        source.read(b"a", 0, 3, version)


def test_a_listing_without_end_is_an_error(
    server: ObjectServer, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
    monkeypatch.setattr(server, "listing", lambda query: f"<ListBucketResult>{page}</ListBucketResult>".encode())
    with pytest.raises(SourceUnavailable, match="the same page of a listing again"):
        list(source.scan(b""))


@pytest.mark.parametrize("size", [-1, 1 << 63])
def test_a_listing_with_an_impossible_size_is_no_listing(
    server: ObjectServer, source: S3Source, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "p/a")
    listing = server.listing
    text = f"<Size>{size}</Size>".encode()
    monkeypatch.setattr(server, "listing", lambda query: listing(query).replace(b"<Size>3</Size>", text))
    with pytest.raises(SourceUnavailable, match="a size that no file has"):
        list(source.scan(b""))


# -- settings


@pytest.mark.parametrize(
    ("config", "variables", "said"),
    [
        ("", {"AWS_ENDPOINT_URL": "SECRET words"}, r"check source\.endpoint"),
        ("", {"AWS_CA_BUNDLE": "/etc/hostname"}, "check"),
        ("", {"AWS_DEFAULT_REGION": "eu west"}, "no region can have this name"),
        ("credential_process = echo SECRET", {}, "prints no credentials"),
        ("credential_process = /none-such SECRET", {}, "the profile names is missing"),
        ("credential_process = false SECRET", {}, "cannot be fetched"),
        ('credential_process = "SECRET', {}, "check"),
        ("SECRET", {}, "cannot be read: check them"),
    ],
)
def test_settings_that_cannot_be_used_are_told_without_what_they_say(
    server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    variables: dict[str, str],
    said: str,
) -> None:
    (tmp_path / "config").write_text(f"[default]\n{config}\n")
    if config:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    endpoint = "" if "AWS_ENDPOINT_URL" in variables else server.url
    with pytest.raises(SourceUnavailable, match=said) as raised:
        S3Source("s3://bucket", StoreSettings(endpoint=endpoint)).stat(b"")
    assert "SECRET" not in repr(raised.value)


def test_requests_are_signed_by_what_the_environment_has(
    server: ObjectServer, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    put(server, "p/a")
    source.read(b"a", 0, 3, source.stat(b"a").version)
    for headers in server.headers:
        assert "Credential=KEY/" in headers["authorization"]
        assert headers["x-amz-security-token"] == TOKEN


def test_a_profile_has_credentials_region_and_endpoint(server: ObjectServer, tmp_path: Path) -> None:
    put(server, "p/a")
    (tmp_path / "config").write_text(f"[profile other]\nregion = eu-central-1\nendpoint_url = {server.url}\n")
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = OTHER\naws_secret_access_key = secret\n")
    source = S3Source("s3://bucket/p", StoreSettings(profile="other"))
    source.read(b"a", 0, 3, source.stat(b"a").version)
    signed = [headers["authorization"] for headers in server.headers]
    assert len(signed) == 2
    assert all("Credential=OTHER/" in text and "/eu-central-1/s3/" in text for text in signed)
    with pytest.raises(SourceUnavailable, match="no such profile"):
        opened(server, profile="none-such").stat(b"")


def test_without_credentials_a_user_is_told_what_to_do(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, "p/a")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceUnavailable, match=r"set AWS_PROFILE or source\.profile, or source\.anonymous"):
        opened(server).stat(b"")
    source = opened(server, anonymous=True)
    assert bytes(source.read(b"a", 0, 3, source.stat(b"a").version)) == b"p/a"
    assert not any("authorization" in headers for headers in server.headers)


def test_a_requester_pays(server: ObjectServer) -> None:
    put(server, "p/a")
    source = opened(server, requester_pays=True)
    source.read(b"a", 0, 3, source.stat(b"a").version)
    assert [headers["x-amz-request-payer"] for headers in server.headers] == ["requester"] * 2


def test_a_bucket_may_be_named_by_the_host(monkeypatch: pytest.MonkeyPatch, server: ObjectServer) -> None:
    port = server.url.rpartition(":")[2]
    source = S3Source("s3://bucket", StoreSettings(endpoint=f"http://localhost:{port}", addressing="virtual"))
    store = source._bucket._connected().gets
    assert store.config["endpoint"] == f"http://bucket.localhost:{port}"
    assert str(store.config["virtual_hosted_style_request"]).lower() == "true"


def test_rotated_credentials_are_found(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, "p/a")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(s3_bucket, "_RECONNECT_S", 0.0)
    credentials = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(credentials.format("FIRST"))

    def refuse_the_first(request: str) -> tuple[int, str] | None:
        return (403, "InvalidAccessKeyId") if "FIRST" in str(server.headers[-1]) and rotated else None

    rotated, source = False, opened(server)
    server.fails = refuse_the_first
    version = source.stat(b"a").version
    rotated = True
    (tmp_path / "credentials").write_text(credentials.format("SECOND"))
    with pytest.raises(SourceUnavailable):
        source.read(b"a", 0, 3, version)
    assert bytes(source.read(b"a", 0, 3, version)) == b"p/a"


def test_a_store_may_have_a_certificate_of_its_own(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "localhost.pem"
    certificate.write_bytes(own_certificate("localhost"))
    with object_server(certificate=certificate) as store:
        put(store, "p/a")
        with pytest.raises(SourceUnavailable, match=r"not trusted: .* AWS_CA_BUNDLE"):
            opened(store).stat(b"")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        source = opened(store)
        assert bytes(source.read(b"a", 0, 3, source.stat(b"a").version)) == b"p/a"
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing"))
        with pytest.raises(SourceUnavailable, match=r"AWS_CA_BUNDLE .* is missing"):
            opened(store).stat(b"")


def own_certificate(host: str) -> bytes:
    """A certificate that a host has signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)


def test_another_region_of_amazons_is_found(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def head_bucket(self: S3Source, lists: object) -> str:
        asked.append(lists)
        return "eu-west-3"

    monkeypatch.setattr(s3_bucket.Bucket, "_region", head_bucket)
    clients = S3Source("s3://bucket", StoreSettings())._bucket._connected()
    assert clients.lists.meta.region_name == "eu-west-3"
    assert clients.gets.config["endpoint"] == "https://bucket.s3.eu-west-3.amazonaws.com"
    assert len(asked) == 1
    S3Source("s3://bucket", StoreSettings(region="eu-west-1"))._bucket._connected()
    assert len(asked) == 1


def test_libraries_do_not_log_what_they_send(
    server: ObjectServer, source: S3Source, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, "p/a")
    with caplog.at_level(logging.DEBUG):
        source.read(b"a", 0, 3, source.stat(b"a").version)
    assert [record for record in caplog.records if record.name.startswith(("botocore", "urllib3"))] == []


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'spiderfs\[s3\]'"):
        S3Source("s3://bucket", StoreSettings())


def test_a_forked_process_connects_anew(server: ObjectServer) -> None:
    """In a process of its own: after its first GET, nothing that it forks may go on with its connections."""
    put(server, "p/a")
    program = f"""
import os, signal
from spiderfs.sources.s3 import S3Source
from spiderfs.sources.s3_bucket import StoreSettings
source = S3Source("s3://bucket/p", StoreSettings(endpoint={server.url!r}))
pid = os.fork()
version = source.stat(b"a").version
if pid == 0:
    assert bytes(source.read(b"a", 0, 3, version)) == b"p/a"
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0
inherited = os.fork()
if inherited == 0:
    signal.alarm(20)
    assert source.stat(b"a").version == version
    os._exit(0)
_, status = os.waitpid(inherited, 0)
assert status == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
