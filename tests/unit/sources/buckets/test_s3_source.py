"""Amazon's S3, and stores that speak so: how they are found, who asks, and what is never said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import own_certificate
from object_server import ObjectServer, object_server

from benchmarks.common.sources import patterned
from spiderfs.errors import ConfigError, SourceTimeout, SourceUnavailable
from spiderfs.sources.buckets import bucket, s3
from spiderfs.sources.buckets.source import BucketSource
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import identity_of, open_source

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
def source(server: ObjectServer) -> BucketSource:
    return opened(server)


def opened(server: ObjectServer, url: str = "s3://bucket/p", **settings: object) -> BucketSource:
    return open_source(url, StoreSettings(endpoint=server.url, **settings))


def put(server: ObjectServer, *keys: str) -> None:
    server.objects.update({key: key.encode() for key in keys})


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
        open_source("s3://bucket", StoreSettings(endpoint=endpoint)).stat(b"")
    assert "SECRET" not in repr(raised.value)


def test_requests_are_signed(server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch) -> None:
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
    source = open_source("s3://bucket/p", StoreSettings(profile="other"))
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


def test_rotated_credentials_are_found(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, "p/a")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(bucket, "RECONNECT_S", 0.0)
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


def test_a_requester_pays(server: ObjectServer) -> None:
    put(server, "p/a")
    source = opened(server, requester_pays=True)
    source.read(b"a", 0, 3, source.stat(b"a").version)
    assert [headers["x-amz-request-payer"] for headers in server.headers] == ["requester"] * 2


def test_a_bucket_may_be_named_by_the_host(monkeypatch: pytest.MonkeyPatch, server: ObjectServer) -> None:
    port = server.url.rpartition(":")[2]
    source = open_source("s3://bucket", StoreSettings(endpoint=f"http://localhost:{port}", addressing="virtual"))
    store = source._bucket.connected().gets
    assert store.config["endpoint"] == f"http://bucket.localhost:{port}"
    assert str(store.config["virtual_hosted_style_request"]).lower() == "true"


def test_a_store_may_sign_for_itself(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_another_region_of_amazons_is_found(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def head_bucket(self: BucketSource, lists: object) -> str:
        asked.append(lists)
        return "eu-west-3"

    monkeypatch.setattr(s3.S3Bucket, "_region", head_bucket)
    clients = open_source("s3://bucket", StoreSettings())._bucket.connected()
    assert clients.lists.meta.region_name == "eu-west-3"
    assert clients.gets.config["endpoint"] == "https://bucket.s3.eu-west-3.amazonaws.com"
    assert len(asked) == 1
    open_source("s3://bucket", StoreSettings(region="eu-west-1"))._bucket.connected()
    assert len(asked) == 1


def test_libraries_log_nothing(server: ObjectServer, source: BucketSource, caplog: pytest.LogCaptureFixture) -> None:
    put(server, "p/a")
    with caplog.at_level(logging.DEBUG):
        source.read(b"a", 0, 3, source.stat(b"a").version)
    assert [record for record in caplog.records if record.name.startswith(("botocore", "urllib3"))] == []


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[mount,s3\]'"):
        open_source("s3://bucket", StoreSettings())


def test_a_forked_process_connects_again(server: ObjectServer) -> None:
    """In a process of its own: after its first GET, nothing that it forks may go on with its connections."""
    put(server, "p/a")
    program = f"""
import os, signal
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import open_source
source = open_source("s3://bucket/p", StoreSettings(endpoint={server.url!r}))
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


def test_another_host_that_a_get_is_sent_to_is_not_given_the_signature(
    server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    with object_server() as other:
        put(other, "p/a")
        where = other.url.replace("127.0.0.1", "localhost")
        handler = server._server.RequestHandlerClass
        monkeypatch.setattr(handler, "do_GET", lambda self: self._answer(307, b"", {"Location": where + self.path}))
        assert bytes(source.read(b"a", 0, 3, version)) == b"p/a"
        assert other.asked() == ["GET p/a"]
        assert "authorization" not in other.headers[-1]
        assert SECRET not in str(other.headers)
        with pytest.raises(SourceUnavailable):
            source.stat(b"a")
        assert other.asked() == []


def test_https_is_not_left_by_redirects(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "localhost.pem"
    certificate.write_bytes(own_certificate("localhost"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    put(server, "p/a")
    with object_server(certificate=certificate) as store:
        put(store, "p/a")
        source = opened(store)
        version = source.stat(b"a").version
        handler = store._server.RequestHandlerClass
        monkeypatch.setattr(
            handler, "do_GET", lambda self: self._answer(307, b"", {"Location": server.url + self.path})
        )
        with pytest.raises(SourceUnavailable):
            source.read(b"a", 0, 3, version)
    assert server.asked() == []


def test_the_identity_names_the_store(tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity_of("s3://bucket/p/") == "s3://bucket/p"
    assert identity_of("s3://bucket/p", StoreSettings(region="eu-west-1")) == "s3://bucket/p"
    at = "s3://bucket/p at http://store:1"
    assert identity_of("s3://bucket/p", StoreSettings("http://store:1")) == at
    (tmp_path / "config").write_text("[profile other]\nendpoint_url = http://store:1/\n")
    assert identity_of("s3://bucket/p", StoreSettings(profile="other")) == at
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:1")
    assert identity_of("s3://bucket/p/") == at
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:SECRET@store:1")
    with pytest.raises(SourceUnavailable, match="logs in: leave that out") as raised:
        identity_of("s3://bucket/p/")
    assert "SECRET" not in repr(raised.value)


def test_an_answer_may_take_longer_than_the_time_limit_while_it_comes(server: ObjectServer) -> None:
    source = opened(server, timeout_s=1.0)
    server.objects["p/large"] = content = patterned(0, (3 << 20) + 1)
    version = source.stat(b"large").version
    server.pause_s = 0.4
    assert b"".join(bytes(piece) for piece in source.stream(b"large", 1, len(content) - 1, version)) == content[1:]
    server.pause_s = 1.5
    with pytest.raises(SourceTimeout):
        list(source.stream(b"large", 1, len(content) - 1, version))
