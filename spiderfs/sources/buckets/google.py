"""Google's Cloud Storage: `gs://`.

Both listings and GETs go by its XML API, which speaks nearly as S3 does, so ETags of both are the same. Credentials are
those that Google's own libraries find: GOOGLE_APPLICATION_CREDENTIALS, gcloud's file, a machine's metadata server.
"""

from __future__ import annotations

from datetime import UTC
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from spiderfs.sources.buckets.bucket import Bucket, Page, amazons_page, failure
from spiderfs.sources.buckets.lists import BearerToken, HttpLists, authorities, unsigned

_PUBLIC = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_LOG_IN = "set GOOGLE_APPLICATION_CREDENTIALS, or run 'gcloud auth application-default login'"
_TROUBLES = {
    "DefaultCredentialsError": f"no credentials are found: {_LOG_IN}, or set source.anonymous for a bucket that all may"
    " read",
    "RefreshError": f"the credentials are not accepted any more: {_LOG_IN}",
    "TransportError": "the server of its credentials cannot be reached: check the network",
}


class GoogleBucket(Bucket):
    scheme = "gs"
    libraries = ("google.auth", "obstore", "requests")
    rights = "grant the role roles/storage.objectViewer"
    noisy = ("google", "urllib3")
    # What was packed with gzip is sent as it is; otherwise it would come unpacked, and larger than it was listed.
    headers = MappingProxyType({"accept-encoding": "gzip"})

    @cached_property
    def endpoint(self) -> str:
        return self.settings.endpoint

    def connect(self) -> tuple[Any, Any]:
        from obstore.store import GCSStore

        url = self.endpoint or _PUBLIC
        sign, options = unsigned, {}
        if not self.settings.anonymous:
            token = BearerToken(partial(_token, str(self), self._credentials()))
            sign, options = token.sign, {"credential_provider": token.for_obstore}
        lists = HttpLists(f"{url}/{self.name}", sign, self.settings.timeout_s, {})
        skip = self.settings.anonymous
        return lists, self.store(GCSStore, url, authorities(), base_url=url, skip_signature=skip, **options)

    def listed(self, lists: Any, prefix: str, token: str, most: int) -> Page:
        asked = {"list-type": "2", "prefix": prefix, "delimiter": "/", "max-keys": str(most), "encoding-type": "url"}
        if token:
            asked["continuation-token"] = token
        return amazons_page(lists.page(asked), quoted=True)

    def _credentials(self) -> Any:
        import google.auth
        from google.auth.exceptions import GoogleAuthError

        try:
            return google.auth.default(scopes=[_SCOPE])[0]
        except (GoogleAuthError, OSError, ValueError) as exc:
            raise failure(self, exc, _TROUBLES) from None


def _token(bucket: str, credentials: Any) -> tuple[str, float]:
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        credentials.refresh(Request())
    except (GoogleAuthError, OSError, ValueError) as exc:
        raise failure(bucket, exc, _TROUBLES) from None
    # Google's times have no zone, and mean UTC.
    return credentials.token, credentials.expiry.replace(tzinfo=UTC).timestamp()
