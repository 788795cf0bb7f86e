"""Asking one bucket: pages of its listing through botocore, objects through obstore, and what its errors mean.

A GET by obstore in whatever thread calls takes 98 to 116 us of processor time with 64 in flight, and 180 over asyncio.
botocore finds endpoint, region and credentials as all of Amazon's programs do, for obstore too.

**Processes.** obstore's threads do not survive a fork: after one GET even a new store hangs in a forked child. So every
process connects when it asks its first question, and none does before the forks of a mount.

**Errors.** 503, NoSuchBucket, credentials that have expired and objects in an archive are one error to obstore, so they
are told apart by the `<Code>` in the body. A file is gone only if the store says NoSuchKey; a bucket that is gone or
credentials that are refused say nothing about a file. Retries are made in `sources/client.py`, and those of later pages
of a listing in `s3.py`. No message has a text of the store's: these may repeat signatures and tokens, which must not
reach a log. For the same reason the libraries do not log.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from spiderfs.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.sources.s3_listing import Page, PageParsers

if TYPE_CHECKING:
    from obstore import Bytes, GetResult
    from obstore.store import ClientConfig

# A store that is there accepts a connection in milliseconds.
_CONNECT_S = 5.0
# Connections that are kept between requests; more questions at a time open further ones.
_KEPT_CONNECTIONS = 128
# obstore asks for credentials again after so long; botocore renews those that end sooner.
_CREDENTIALS_S = 300.0
# After credentials were refused, others are looked for no more often than this: to connect takes 0.2 s.
_RECONNECT_S = 5.0
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")

# What the codes of errors mean, and what a user can do. All others say that the store has not answered.
_GONE = {"NoSuchKey", "NoSuchVersion"}
_CHANGED = {"InvalidRange", "PreconditionFailed"}
_THROTTLED = {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "TooManyRequests", "Throttling", "503", "429"}
_DENIED = {
    "AccessDenied": "these credentials may not read it: allow s3:ListBucket and s3:GetObject",
    "AllAccessDisabled": "the store refuses all access to it",
    "InvalidObjectState": "it lies in an archive: restore it first",
    "403": "the store refuses to say anything of it",
}
_REFUSED_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId",
    "SignatureDoesNotMatch", "401",
}  # fmt: skip
_ADVICE = {
    "NoSuchBucket": "there is no such bucket: check its name, source.endpoint and source.region",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": "the bucket lies in another region: set source.region",
    "AuthorizationHeaderMalformed": "the bucket lies in another region: set source.region",
    "InvalidBucketName": "no bucket can have this name: check it",
}  # fmt: skip

_UNREACHED = "it cannot be reached: check source.endpoint and the network"
_SIGN_ON = "the single sign-on has ended: sign on again (aws sso login)"
_TROUBLES = {
    "EndpointConnectionError": _UNREACHED,
    "ConnectTimeoutError": _UNREACHED,
    "ProxyConnectionError": "the proxy cannot be reached: check HTTPS_PROXY",
    "ReadTimeoutError": "it has not answered in time",
    "ConnectionClosedError": "it has broken off",
    "SSLError": "its certificate is not trusted: name the authority's in AWS_CA_BUNDLE",
    "ProfileNotFound": "there is no such profile: check source.profile and AWS_PROFILE",
    "PartialCredentialsError": "half of the credentials are missing: check them",
    "CredentialRetrievalError": "credentials cannot be fetched: check the profile and what it runs or asks",
    "SSOTokenLoadError": _SIGN_ON,
    "UnauthorizedSSOTokenError": _SIGN_ON,
    "TokenRetrievalError": _SIGN_ON,
    "ConfigParseError": "~/.aws/config or ~/.aws/credentials cannot be read: check them",
    "FileNotFoundError": "a file that AWS_CA_BUNDLE or the profile names is missing",
    "InvalidRegionError": "no region can have this name: check source.region and AWS_DEFAULT_REGION",
    # Of redirects botocore asks whither, which this store answers by another one.
    "RecursionError": "it redirects requests without end: check source.endpoint",
    "ValueError": "a setting cannot be used: check source.endpoint, the AWS_ variables and the profile",
    "JSONDecodeError": "the profile's credential_process prints no credentials: check it",
}


class StoreSettings(NamedTuple):
    """How a store is reached; what is empty is found as other programs find it (AWS_* variables, profiles, roles)."""

    endpoint: str = ""
    region: str = ""
    profile: str = ""
    anonymous: bool = False
    requester_pays: bool = False
    addressing: str = "auto"
    timeout_s: float = 30.0


class _Clients(NamedTuple):
    """What one process asks by: botocore's client, obstore's store, and when they were made."""

    pid: int
    lists: Any
    gets: Any
    made_at: float


class Bucket:
    """Asks nothing until the first question. Safe for threads, and on both sides of a fork."""

    def __init__(self, name: str, settings: StoreSettings) -> None:
        self._name = name
        self._settings = settings
        self._clients: _Clients | None = None
        self._connecting = threading.Lock()

    def page(self, prefix: str, token: str = "", most: int = 1000) -> Page:
        """A page of the keys that begin with `prefix`, up to the next slash; raises SourceError."""
        asked = {"ContinuationToken": token} if token else {}
        if self._settings.requester_pays:
            asked["RequestPayer"] = "requester"
        clients = self._connected()
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = clients.lists.list_objects_v2(
                Bucket=self._name, Prefix=prefix, Delimiter="/", MaxKeys=most, EncodingType="url", **asked
            )
        except ClientError as exc:
            # A page of HTML, from something in front of the store, has no code.
            code = exc.response["Error"].get("Code") or str(exc.response["ResponseMetadata"]["HTTPStatusCode"])
            # A listing says that something is gone by not having it.
            raise self._error("" if code in _GONE else code, prefix, clients) from None
        except (BotoCoreError, RecursionError) as exc:
            raise SourceUnavailable(f"s3://{self._name}: {_trouble(exc)}") from None
        page: Page = answer["page"]
        return page

    def get(self, key: str, extent: tuple[int, int] | None = None) -> GetResult:
        """What the store has under a key, or the bytes of `extent` of it; `body` reads them. Raises SourceError."""
        clients = self._connected()
        import obstore

        try:
            # `get_range` gives no ETag. A store that answers no ranges can give whole objects.
            return obstore.get(clients.gets, key, options=None if extent is None else {"range": extent})
        except Exception as exc:
            raise self._error(_code_of(exc), key, clients) from None

    def body(self, answer: GetResult, key: str, length: int) -> Any:
        """The bytes, in a buffer of obstore's; raises SourceUnavailable unless all `length` of them come."""
        try:
            body: Bytes = answer.bytes()
        except Exception as exc:
            raise SourceUnavailable(f"{key}: the answer broke off ({type(exc).__name__})") from None
        if len(body) != length:
            raise SourceUnavailable(f"{key}: {len(body)} bytes came and not {length}")
        return body

    def close(self) -> None:
        self._clients = None

    def _error(self, code: str, key: str, clients: _Clients) -> SourceError:
        """The error for a code of the store, or for an HTTP status where there is no code."""
        if code in _GONE:
            return SourceNotFound(f"{key}: no such object")
        if code in _CHANGED:
            return SourceChanged(f"{key}: no longer the version that was asked for")
        where = f"s3://{self._name}"
        if code in _DENIED:
            return SourceDenied(f"{where}/{key}: {_DENIED[code]} ({code})")
        if code in _THROTTLED:
            return SourceThrottled(f"{where} is asked for too much at a time ({code})")
        if code in _REFUSED_CREDENTIALS:
            # They may have been rotated: the next question is asked with what can be found then.
            if self._clients is clients and time.monotonic() - clients.made_at > _RECONNECT_S:
                self._clients = None
            return SourceUnavailable(f"{where} refuses the credentials ({code}): renew them")
        if not code:
            return SourceUnavailable(f"{where} has not answered: check source.endpoint and the network")
        return SourceUnavailable(f"{where}: {_ADVICE.get(code, 'the store has failed')} ({code})")

    # -- clients

    def _connected(self) -> _Clients:
        clients = self._clients
        if clients is None or clients.pid != os.getpid():
            with self._connecting:
                clients = self._clients
                if clients is None or clients.pid != os.getpid():
                    clients = self._clients = self._connect()
        return clients

    def _connect(self) -> _Clients:
        """Make the clients of this process; raises SourceUnavailable if no credentials are found."""
        import botocore.session
        from botocore.exceptions import BotoCoreError

        for library in ("botocore", "urllib3"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
        settings = self._settings
        session = botocore.session.Session(profile=settings.profile or None)
        parsers = session.get_component("response_parser_factory")
        session.register_component("response_parser_factory", PageParsers(parsers))
        try:
            credentials = None if settings.anonymous else session.get_credentials()
            if credentials is None and not settings.anonymous:
                raise SourceUnavailable(
                    f"no credentials for s3://{self._name} are found: set AWS_PROFILE or source.profile, or"
                    " source.anonymous for a bucket that all may read"
                )
            lists = self._list_client(session, settings.region or None)
            if not settings.region and urlsplit(lists.meta.endpoint_url).netloc.endswith(".amazonaws.com"):
                region = self._region(lists)
                if region and region != lists.meta.region_name:
                    lists = self._list_client(session, region)
            gets = self._get_store(session, lists, credentials)
        except (BotoCoreError, OSError, ValueError) as exc:
            # What is wrong in variables and profiles is a ValueError of whatever reads it.
            raise SourceUnavailable(f"s3://{self._name}: {_trouble(exc)}") from None
        return _Clients(os.getpid(), lists, gets, time.monotonic())

    def _list_client(self, session: Any, region: str | None) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        settings = self._settings
        config = Config(
            signature_version=UNSIGNED if settings.anonymous else "s3v4",
            retries={"total_max_attempts": 1},
            connect_timeout=_CONNECT_S,
            read_timeout=settings.timeout_s,
            max_pool_connections=_KEPT_CONNECTIONS,
            s3=None if settings.addressing == "auto" else {"addressing_style": settings.addressing},
        )
        # Any region will do for a store that has none.
        region = region or session.get_config_variable("region") or "us-east-1"
        return session.create_client("s3", region_name=region, endpoint_url=settings.endpoint or None, config=config)

    def _region(self, lists: Any) -> str:
        """The region in which AWS has the bucket, which it says to anybody."""
        from botocore.exceptions import ClientError

        try:
            answer = lists.head_bucket(Bucket=self._name)
        except ClientError as exc:
            answer = exc.response
        region: str = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
        return region

    def _get_store(self, session: Any, lists: Any, credentials: Any) -> Any:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        address = urlsplit(_url_of_get(lists, self._name, "k"))
        in_path = address.path.removesuffix("/k").endswith(f"/{self._name}")
        path = address.path.removesuffix("/k").removesuffix(f"/{self._name}" if in_path else "")
        options: dict[str, Any] = {"skip_signature": credentials is None}
        if credentials is not None:
            options["credential_provider"] = partial(_frozen, credentials)
        client: ClientConfig = {
            "allow_http": True,
            "connect_timeout": f"{_CONNECT_S:g}s",
            "timeout": f"{self._settings.timeout_s:g}s",
        }
        authorities = session.get_config_variable("ca_bundle")
        if authorities:
            with open(authorities, "rb") as file:
                client["root_certificate"] = file.read()
        try:
            return S3Store(
                self._name,
                endpoint=f"{address.scheme}://{address.netloc}{path}",
                region=lists.meta.region_name,
                virtual_hosted_style_request=not in_path,
                request_payer=self._settings.requester_pays,
                client_options=client,
                retry_config={"max_retries": 0},
                **options,
            )
        except BaseError:
            raise SourceUnavailable(f"s3://{self._name} cannot be asked: check the AWS_ variables") from None


def _url_of_get(lists: Any, bucket: str, key: str) -> str:
    """Where botocore would ask for an object: a bucket is named in the path, or in front of the host."""
    from botocore.awsrequest import AWSResponse

    urls: list[str] = []

    def answer(request: Any, **_: object) -> AWSResponse:
        # In place of the store's answer, so nothing is sent.
        urls.append(request.url)
        return AWSResponse(request.url, 200, {}, None)

    lists.meta.events.register("before-send.s3.GetObject", answer)
    lists.get_object(Bucket=bucket, Key=key)
    return urls[0]


def _frozen(credentials: Any) -> dict[str, Any]:
    """Credentials as obstore wants them."""
    key, secret, token = credentials.get_frozen_credentials()[:3]
    ends = datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_S)
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": ends}


def _code_of(exc: Exception) -> str:
    """The code of the store's error, or else the HTTP status; empty if the store has not answered."""
    text = str(exc)
    code = _CODE.search(text) or _STATUS.search(text)
    return code[1] if code else ""


def _trouble(exc: Exception) -> str:
    """What botocore has met, in our words: the texts of these may have URLs of requests in them."""
    name = type(exc).__name__
    return _TROUBLES.get(name, f"botocore has failed ({name})")
