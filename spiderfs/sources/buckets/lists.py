"""Listings over plain HTTP, for stores whose own libraries read no more than a few of them in a second.

`requests` asks, because the libraries that find credentials at Google's and Microsoft's need it too, and it follows the
same variables as they do (proxies, REQUESTS_CA_BUNDLE).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from spiderfs.sources.buckets.bucket import CREDENTIALS_S, NO_ADDRESS, UNREACHED, Refusal, failure
from spiderfs.sources.object_source import CONNECT_S, KEPT_CONNECTIONS

Sign = Callable[[Any], Any]
"""Adds what logs in to a request that is ready to be sent, and returns it."""

# A token that ends sooner is renewed.
_RENEWED_S = 300.0
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_TROUBLES = {
    "ConnectionError": UNREACHED,
    "ConnectTimeout": UNREACHED,
    "ReadTimeout": "it has not answered in time",
    "ChunkedEncodingError": "it has broken off",
    "ProxyError": "the proxy cannot be reached: check HTTPS_PROXY",
    "SSLError": "its certificate is not trusted: name the authority's in REQUESTS_CA_BUNDLE",
    "InvalidURL": NO_ADDRESS,
    "InvalidProxyURL": NO_ADDRESS,
    "OSError": "its certificate cannot be checked: check REQUESTS_CA_BUNDLE",
}


def authorities() -> str | None:
    """The file of further certificates, as `requests` finds it."""
    return os.environ.get("REQUESTS_CA_BUNDLE") or None


class HttpLists:
    """Asks for pages of one bucket's listing; safe for threads."""

    def __init__(self, url: str, sign: Sign, timeout_s: float, headers: Mapping[str, str]) -> None:
        import requests
        from requests.adapters import HTTPAdapter

        self._url = url
        self._timeout = CONNECT_S, timeout_s
        self._session = requests.Session()
        # This also keeps ~/.netrc from being asked.
        self._session.auth = sign
        self._session.headers.update({"Accept-Encoding": "identity", **headers})
        adapter = HTTPAdapter(pool_maxsize=KEPT_CONNECTIONS, max_retries=0)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)

    def page(self, asked: Mapping[str, str]) -> bytes:
        """The answer to these parameters; raises Refusal, SourceUnavailable."""
        try:
            # No one who is redirected is to carry a token somewhere else.
            answer = self._session.get(self._url, params=dict(asked), timeout=self._timeout, allow_redirects=False)
        except OSError as exc:
            # Errors of `requests` are OSErrors.
            raise failure(self._url, exc, _TROUBLES) from None
        if answer.status_code != 200:
            code = _CODE.search(answer.content)
            raise Refusal(code[1].decode() if code else str(answer.status_code))
        return bytes(answer.content)


class BearerToken:
    """A token that is fetched now, and renewed before it ends. Safe for threads."""

    def __init__(self, fetch: Callable[[], tuple[str, float]]) -> None:
        """`fetch` gives a token and when it ends, in seconds since the epoch; raises SourceUnavailable."""
        self._fetch = fetch
        # Before obstore asks for it, to which every failure is one.
        self._token, self._ends_s = fetch()
        self._fetching = threading.Lock()

    def current(self) -> str:
        with self._fetching:
            if time.time() > self._ends_s - _RENEWED_S:
                self._token, self._ends_s = self._fetch()
            return self._token

    def sign(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self.current()}"
        return request

    def for_obstore(self) -> dict[str, Any]:
        return {"token": self.current(), "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S)}


def unsigned(request: Any) -> Any:
    return request
