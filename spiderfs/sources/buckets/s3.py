"""Amazon's S3, and stores that speak as S3 does: `s3://`.

botocore finds endpoint, region and credentials as all of Amazon's programs do, signs the questions for pages, and
understands their errors. obstore's GETs get from it what they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.buckets import bucket
from spiderfs.sources.object_source import CONNECT_S, KEPT_CONNECTIONS

# Amazon's own addresses; the names of buckets are the same at all of them.
_AMAZON = ".amazonaws.com"
# Any region will do for a store that has none.
_ANY_REGION = "us-east-1"

_SIGN_ON = "the single sign-on has ended: sign on again (aws sso login)"
_TROUBLES = {
    "EndpointConnectionError": bucket.UNREACHED,
    "ConnectTimeoutError": bucket.UNREACHED,
    "HTTPClientError": bucket.NO_ADDRESS,
    "ProxyConnectionError": "the proxy cannot be reached: check HTTPS_PROXY",
    "ReadTimeoutError": "it has not answered in time",
    "ConnectionClosedError": "it has broken off",
    "SSLError": "its certificate is not trusted: name the authority's in AWS_CA_BUNDLE",
    "ProfileNotFound": "there is no such profile: check source.profile and AWS_PROFILE",
    "PartialCredentialsError": "half of the credentials are missing: check them",
    "CredentialRetrievalError": "credentials cannot be fetched: check the profile, and its process or endpoint",
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


class S3Bucket(bucket.Bucket):
    scheme = "s3"
    libraries = ("botocore", "obstore")
    rights = "allow s3:ListBucket and s3:GetObject"
    noisy = ("botocore", "urllib3")

    @cached_property
    def endpoint(self) -> str:
        if self.settings.endpoint:
            return self.settings.endpoint
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        try:
            session = _session(self.settings.profile)
            region = self.settings.region or session.get_config_variable("region") or _ANY_REGION
            # Unsigned, for otherwise it would look for credentials, perhaps in the network.
            client = session.create_client("s3", region_name=region, config=Config(signature_version=UNSIGNED))
        except (BotoCoreError, OSError, ValueError) as exc:
            raise bucket.failure(self, exc, _TROUBLES) from None
        found = urlsplit(client.meta.endpoint_url)
        if "@" in found.netloc or found.query:
            raise SourceUnavailable(f"{self}: the endpoint of its profile or AWS_ENDPOINT_URL logs in: leave that out")
        return "" if found.netloc.endswith(_AMAZON) else found.geturl().rstrip("/")

    def listed(self, lists: Any, prefix: str, token: str, most: int) -> bucket.Page:
        asked = {"ContinuationToken": token} if token else {}
        if self.settings.requester_pays:
            asked["RequestPayer"] = "requester"
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = lists.list_objects_v2(
                Bucket=self.name, Prefix=prefix, Delimiter="/", MaxKeys=most, EncodingType="url", **asked
            )
        except ClientError as exc:
            # A page of HTML, from something in front of the store, has no code.
            code = exc.response["Error"].get("Code") or str(exc.response["ResponseMetadata"]["HTTPStatusCode"])
            raise bucket.Refusal(code) from None
        except (BotoCoreError, RecursionError) as exc:
            raise bucket.failure(self, exc, _TROUBLES) from None
        page: bucket.Page = answer["page"]
        return page

    def connect(self) -> tuple[Any, Any]:
        from botocore.exceptions import BotoCoreError

        settings = self.settings
        try:
            session = _session(settings.profile)
            parsers = session.get_component("response_parser_factory")
            own = parsers.create_parser
            parsers.create_parser = lambda protocol: _PageParser(own(protocol))
            credentials = None if settings.anonymous else session.get_credentials()
            if credentials is None and not settings.anonymous:
                raise SourceUnavailable(
                    f"no credentials for {self} are found: set AWS_PROFILE or source.profile, or source.anonymous for a"
                    " bucket that all may read"
                )
            lists = self._client(session, settings.region)
            if not settings.region and not self.endpoint:
                region = self._region(lists)
                if region and region != lists.meta.region_name:
                    lists = self._client(session, region)
            return lists, self._gets(session, lists, credentials)
        except (BotoCoreError, OSError, ValueError) as exc:
            # What is wrong in variables and profiles is a ValueError of whatever reads it.
            raise bucket.failure(self, exc, _TROUBLES) from None

    def _client(self, session: Any, region: str) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        settings = self.settings
        config = Config(
            signature_version=UNSIGNED if settings.anonymous else "s3v4",
            retries={"total_max_attempts": 1},
            connect_timeout=CONNECT_S,
            read_timeout=settings.timeout_s,
            max_pool_connections=KEPT_CONNECTIONS,
            s3=None if settings.addressing == "auto" else {"addressing_style": settings.addressing},
            # The profile may have changed since the endpoint was found in it.
            ignore_configured_endpoint_urls=True,
        )
        region = region or session.get_config_variable("region") or _ANY_REGION
        return session.create_client("s3", region_name=region, endpoint_url=self.endpoint or None, config=config)

    def _region(self, lists: Any) -> str:
        """The region in which AWS has the bucket, which it says to anybody."""
        from botocore.exceptions import ClientError

        try:
            answer = lists.head_bucket(Bucket=self.name)
        except ClientError as exc:
            answer = exc.response
        region: str = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
        return region

    def _gets(self, session: Any, lists: Any, credentials: Any) -> Any:
        from obstore.store import S3Store

        address = urlsplit(_url_of_get(lists, self.name, "k"))
        in_path = address.path.removesuffix("/k").endswith(f"/{self.name}")
        path = address.path.removesuffix("/k").removesuffix(f"/{self.name}" if in_path else "")
        options: dict[str, Any] = {"skip_signature": credentials is None}
        if credentials is not None:
            options["credential_provider"] = partial(_frozen, credentials)
        endpoint = f"{address.scheme}://{address.netloc}{path}"
        return self.store(
            S3Store,
            endpoint,
            session.get_config_variable("ca_bundle"),
            endpoint=endpoint,
            region=lists.meta.region_name,
            virtual_hosted_style_request=not in_path,
            request_payer=self.settings.requester_pays,
            **options,
        )


def _session(profile: str) -> Any:
    """A session that finds variables and profiles as they are now."""
    import botocore.session

    session = botocore.session.Session(profile=profile or None)
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


@cache
def _descriptions(path: str | None) -> Any:
    """What botocore knows of services: a mount asks three times where its bucket lies, 19 ms each in place of 100."""
    from botocore.loaders import create_loader

    return create_loader(path)


def _url_of_get(lists: Any, name: str, key: str) -> str:
    """Where botocore would ask for an object: a bucket is named in the path, or in front of the host."""
    from botocore.awsrequest import AWSResponse

    urls: list[str] = []

    def answer(request: Any, **_: object) -> AWSResponse:
        # In place of the store's answer, so nothing is sent.
        urls.append(request.url)
        return AWSResponse(request.url, 200, {}, None)

    lists.meta.events.register("before-send.s3.GetObject", answer)
    lists.get_object(Bucket=name, Key=key)
    return urls[0]


def _frozen(credentials: Any) -> dict[str, Any]:
    """Credentials as obstore wants them."""
    key, secret, token = credentials.get_frozen_credentials()[:3]
    ends = datetime.now(UTC) + timedelta(seconds=bucket.CREDENTIALS_S)
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": ends}


class _PageParser:
    """In place of botocore's parser for the answers to ListObjectsV2; errors are left to `inner`, botocore's own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def parse(self, response: Mapping[str, Any], shape: Any) -> dict[str, Any]:
        if response["status_code"] >= 300 or response["context"]["operation_name"] != "ListObjectsV2":
            parsed: dict[str, Any] = self._inner.parse(response, shape)
            return parsed
        page = bucket.amazons_page(response["body"])
        return {"page": page, "ResponseMetadata": {"HTTPStatusCode": response["status_code"], "HTTPHeaders": {}}}
