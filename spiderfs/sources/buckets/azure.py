"""Microsoft's Azure Blob Storage: `az://CONTAINER/PREFIX`, where a bucket is called a container.

Containers belong to a storage account, which the endpoint names. Credentials are those that Microsoft's own programs
find: a connection string, the account's key, a shared access signature (SAS), or else whatever azure-identity finds:
variables, the identity of a machine or a workload, `az login`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import cached_property, partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.buckets.bucket import Bucket, Page, failure, microsofts_page
from spiderfs.sources.buckets.lists import BearerToken, HttpLists, Sign, authorities, unsigned
from spiderfs.sources.node_names import is_address

# The first version of the protocol that quotes names which XML cannot have.
_PROTOCOL = "2021-02-12"
_SCOPE = "https://storage.azure.com/.default"
_NO_ACCOUNT = (
    "no storage account is named: set source.endpoint=https://ACCOUNT.blob.core.windows.net, AZURE_STORAGE_ACCOUNT or"
    " AZURE_STORAGE_CONNECTION_STRING"
)
_FIND = (
    "no credentials are found: set AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, run"
    " 'az login', or set source.anonymous for a container that all may read"
)
_TROUBLES = {
    "CredentialUnavailableError": _FIND,
    "ClientAuthenticationError": _FIND,
    "ServiceRequestError": "the server of its credentials cannot be reached: check the network",
    "Error": "the account's key is no key: check AZURE_STORAGE_KEY",
}


class AzureContainer(Bucket):
    scheme = "az"
    libraries = ("azure.identity", "obstore", "requests")
    rights = "assign the role Storage Blob Data Reader, or a SAS that may read and list"
    page_keys = 5000
    noisy = ("azure", "msal", "urllib3")

    @cached_property
    def endpoint(self) -> str:
        if self.settings.endpoint:
            return self.settings.endpoint
        found = _connection_string()
        if "BlobEndpoint" in found:
            return found["BlobEndpoint"].partition("?")[0].rstrip("/")
        account = found.get("AccountName") or _variable("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise SourceUnavailable(f"{self}: {_NO_ACCOUNT}")
        scheme = found.get("DefaultEndpointsProtocol", "https")
        return f"{scheme}://{account}.blob.{found.get('EndpointSuffix', 'core.windows.net')}"

    def connect(self) -> tuple[Any, Any]:
        from obstore.store import AzureStore

        account = self._account()
        sign, options = self._credentials(account)
        headers = {"x-ms-version": _PROTOCOL}
        lists = HttpLists(f"{self.endpoint}/{self.name}", sign, self.settings.timeout_s, headers)
        gets = self.store(
            AzureStore, self.endpoint, authorities(), account_name=account, endpoint=self.endpoint, **options
        )
        return lists, gets

    def listed(self, lists: Any, prefix: str, token: str, most: int) -> Page:
        asked = {"restype": "container", "comp": "list", "prefix": prefix, "delimiter": "/", "maxresults": str(most)}
        asked["include"] = "metadata"
        if token:
            asked["marker"] = token
        return microsofts_page(lists.page(asked))

    def _account(self) -> str:
        """The name of the account: the endpoint's path, which emulators have, or else its host's first part."""
        address = urlsplit(self.endpoint)
        host = address.hostname or ""
        if path := address.path.strip("/"):
            return path
        named = _connection_string().get("AccountName") or _variable(
            "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"
        )
        return named if named and (is_address(host) or "." not in host) else host.partition(".")[0]

    def _credentials(self, account: str) -> tuple[Sign, dict[str, Any]]:
        """How listings are signed, and the same for obstore."""
        if self.settings.anonymous:
            return unsigned, {"skip_signature": True}
        found = _connection_string()
        key = found.get("AccountKey") or _variable("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
        sas = found.get("SharedAccessSignature") or _variable("AZURE_STORAGE_SAS_TOKEN")
        # A connection string is a whole: the key of another variable belongs to another account.
        if sas and (not key or ("SharedAccessSignature" in found and "AccountKey" not in found)):
            sas = sas.lstrip("?")
            return partial(_with_sas, sas), {"credential_provider": lambda: {"sas_token": sas, "expires_at": None}}
        if key:
            try:
                shared = SharedKey(account, key)
            except ValueError as exc:
                raise failure(self, exc, _TROUBLES) from None
            return shared.sign, {"credential_provider": lambda: {"access_key": key, "expires_at": None}}
        from azure.identity import DefaultAzureCredential

        token = BearerToken(partial(_token, str(self), DefaultAzureCredential()))
        return token.sign, {"credential_provider": token.for_obstore}


class SharedKey:
    """Signs with an account's key ("Authorize with Shared Key" of Azure's REST API). ValueError: the key is no key."""

    def __init__(self, account: str, key: str) -> None:
        self._account = account
        self._key = base64.b64decode(key, validate=True)

    def sign(self, request: Any) -> Any:
        request.headers["x-ms-date"] = format_datetime(datetime.now(UTC), usegmt=True)
        address = urlsplit(request.url)
        named = "".join(f"{name}:{request.headers[name]}\n" for name in ("x-ms-date", "x-ms-version"))
        asked = "".join(f"\n{name}:{value}" for name, value in sorted(parse_qsl(address.query, keep_blank_values=True)))
        # Eleven headers that a GET need not have stand between the verb and those that begin with x-ms-.
        text = "GET" + "\n" * 12 + f"{named}/{self._account}{address.path}{asked}"
        signature = base64.b64encode(hmac.digest(self._key, text.encode(), hashlib.sha256)).decode()
        request.headers["Authorization"] = f"SharedKey {self._account}:{signature}"
        return request


def _with_sas(sas: str, request: Any) -> Any:
    request.url += f"&{sas}"
    return request


def _token(container: str, credential: Any) -> tuple[str, float]:
    from azure.core.exceptions import AzureError

    try:
        token = credential.get_token(_SCOPE)
    except (AzureError, OSError, ValueError) as exc:
        raise failure(container, exc, _TROUBLES) from None
    return token.token, float(token.expires_on)


def _connection_string() -> dict[str, str]:
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    return {name.strip(): value for name, found, value in (part.partition("=") for part in text.split(";")) if found}


def _variable(*names: str) -> str:
    return next(filter(None, map(os.environ.get, names)), "")
