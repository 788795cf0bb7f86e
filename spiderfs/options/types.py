"""The types of option values: each parses a text, and writes it back in the same form.

`str(model_dump()[field])` of an Options is therefore a value that `-o` accepts.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator

from spiderfs.forms.partition import Split
from spiderfs.options.units import Capacity, format_duration, format_size, parse_duration, parse_size
from spiderfs.sources.node_names import BY_CLUSTER, as_named, is_address, is_server, is_web_server
from spiderfs.sources.open import is_url
from spiderfs.views.recipe import Recipe, format_recipes, parse_recipes

# With these words `-o forms=` says that there is no split, or that the one of a profile is taken.
ONE_FORM, AUTO = "none", "auto"
# The words of `-o archives=`.
ARCHIVES, NESTED = ("tar", "zip"), "nested"
# What lies between two paths: a path may have colons too.
_NEXT_PATH = re.compile(r":(?=[/~])")
# The name of a data set, at a server that several share.
_DATA_SET = r"[\w.-]+"


def _octal(value: object) -> object:
    if isinstance(value, str):
        try:
            value = int(value, 8)
        except ValueError:
            raise ValueError("this is not an octal mode: write it like 0444") from None
    if isinstance(value, int) and not 0 <= value <= 0o777:
        raise ValueError("a mode sets permissions only: write at most 0777")
    return value


def _absolute(value: object) -> object:
    if isinstance(value, str | Path):
        if not str(value):
            raise ValueError("the path is empty: write the path of a file or directory")
        if "\0" in str(value):
            raise ValueError("the path has a NUL byte: write the path of a file or directory")
        try:
            return Path(os.path.abspath(Path(value).expanduser()))
        except RuntimeError:
            raise ValueError("the home directory for ~ is unknown: write the path without it") from None
    return value


class CacheDirectories(NamedTuple):
    """The directories of one cache, each on a disk of its own."""

    first: Path
    """It has all but the contents of files that lie on the other disks."""
    others: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return ":".join(map(str, self.all))

    @property
    def all(self) -> tuple[Path, ...]:
        return (self.first, *self.others)


def _cache_directories(value: object) -> CacheDirectories:
    """A path, several absolute ones with : between them, or a list of paths."""
    if isinstance(value, CacheDirectories):
        return value
    parts = _NEXT_PATH.split(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    paths = [path for part in parts if isinstance(path := _absolute(part), Path)]
    if not paths or len(paths) < len(parts):
        raise ValueError(
            "this is not the path of a directory: write it like /nvme0/cache, or /nvme0/cache:/nvme1/cache"
        )
    if len(set(paths)) < len(paths):
        raise ValueError("a directory is named twice: name one on each disk")
    return CacheDirectories(paths[0], tuple(paths[1:]))


def _archives(value: str) -> str:
    words = [] if value in ("", "none") else value.split("+")
    if not set(words) <= {*ARCHIVES, NESTED} or words == [NESTED]:
        raise ValueError(f"this names no archives: write tar, zip or tar+zip, and +{NESTED} for those in archives")
    return "+".join(word for word in (*ARCHIVES, NESTED) if word in words)


def _endpoint(value: str) -> str:
    if "@" in value:
        raise ValueError("an address is shown to all who read the mount: leave the password out, and set AWS_PROFILE")
    if value and not is_web_server(value):
        raise ValueError("this is not the address of a server: write it like https://minio.example.org:9000")
    return value.rstrip("/")


def _peers(value: object) -> dict[str, float]:
    """Addresses of nodes, each perhaps with `*WEIGHT`; with + between them, or a list of them."""
    if isinstance(value, dict):
        return value
    parts = value.split("+") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("write the nodes like http://n1:8443+http://n2:8443")
    if parts and parts[0].startswith(BY_CLUSTER.rstrip("/")):
        if len(parts) > 1 or not re.fullmatch(rf"{BY_CLUSTER}{_DATA_SET}", parts[0]):
            raise ValueError(
                "nodes find each other, by the server of cluster, for one data set: write cluster/imagenet"
            )
        return {parts[0]: 1.0}
    found: dict[str, float] = {}
    for part in parts if parts not in (["none"], [""]) else ():
        text, star, weight = part.strip().partition("*")
        try:
            # Of a server none is one that is found out.
            share = float(weight) if star else float(not is_server(text))
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1e6 or (star and not share):
            raise ValueError(f"{weight!r} is no weight of a node: write a number in proportion to its capacity")
        if "@" in text and not is_server(text):
            raise ValueError("the addresses of nodes are shown to all who read the mount: leave logins out")
        if not (url := _data_set_of(text) if is_server(text) else _endpoint(text)) or url in found:
            raise ValueError("a node has no address, or two have one: write them like http://n1:8443+http://n2:8443")
        found[url] = share
    servers = sum(map(is_server, found))
    # Those whose share is found out need something that the others leave.
    most = 1 - 1e-6 if 0 in found.values() else 1 + 1e-9
    if servers and (servers < len(found) or sum(found.values()) > most):
        raise ValueError("servers hold shares of the samples, which are 1 at most in all: write redis://n1/NAME*0.4")
    if len(found) == 1 and not servers and (is_address(as_named(url).host) or found[url] != 1):
        raise ValueError("this is one node: name all nodes, with this one, or a host name with the addresses of all")
    return found


def _data_set_of(value: str) -> str:
    """The URL of a server, with the name that a data set has there."""
    name = value.partition("://")[2].partition("/")[2]
    if not re.fullmatch(_DATA_SET, name):
        raise ValueError("a server holds several data sets: write which, as redis://n1:6379/imagenet")
    return f"{_stream_server(value.removesuffix('/' + name))}/{name}"


def _stream_server(value: str) -> str:
    try:
        parts = urlsplit(value)
        known = parts.scheme in ("redis", "rediss") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or too large
        raise ValueError("this is not the address of a server: write it like redis://n1:6379") from None
    if parts.password is not None:
        raise ValueError("an address is shown to all who read the mount: leave the password out, set REDISCLI_AUTH")
    if value and (not known or parts.path.strip("/") or parts.query or parts.fragment):
        raise ValueError("this is not the address of a server: write it like redis://n1:6379, or rediss:// with TLS")
    return value.rstrip("/")


def _written_peers(value: dict[str, float]) -> str:
    parts = (url if weight == (not is_server(url)) else f"{url}*{_decimal(weight)}" for url, weight in value.items())
    return "+".join(parts) or "none"


def _or(word: str) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value == word else value)


def _written_or(word: str, write: Any = str) -> PlainSerializer:
    return PlainSerializer(lambda value: word if value is None else write(value))


def _forms(value: object) -> object:
    return value if value in (ONE_FORM, AUTO) or not isinstance(value, str) else str(Split.parse(value))


def _decimal(value: float) -> str:
    return f"{value:.12g}"


def radius_of(value: object) -> Literal["class", "nearest"] | float:
    """The radius that `value` names, a number or how to calibrate it; raises ValueError if it is neither."""
    if value == "class" or value == "nearest":
        return value
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError(f"no radius: {str(value)!r}; give a number above 0, class or nearest")
    return number


def _mountable_policy(name: str) -> str:
    # This import is here because options are read long before a policy is needed.
    from spiderfs.policies import mountable_policies

    if name not in (known := sorted(mountable_policies())):
        raise ValueError(f"there is no policy {name!r} for mounts: choose one of {', '.join(known)}")
    return name


def _usable_index(name: str) -> str:
    # As above: options are read long before an index is needed.
    from spiderfs.scorer.graph import is_installed

    if name == "hnsw" and not is_installed():
        raise ValueError("hnswlib is not installed: run `pip install '.[hnsw]'` in a checkout of spiderfs")
    return name


_written_or_none = PlainSerializer(lambda value: value or "none")
# pydantic runs BeforeValidators from right to left, so `_or` sees the value first.
AbsolutePath = Annotated[Path, BeforeValidator(_absolute), PlainSerializer(str)]
CachePlaces = Annotated[CacheDirectories, PlainValidator(_cache_directories), PlainSerializer(str)]
# A directory is a Path, an object store the str of its URL.
SourceName = Annotated[
    Path | str,
    BeforeValidator(lambda value: value if isinstance(value, str) and is_url(value) else _absolute(value)),
    PlainSerializer(str),
]
OptionalPath = Annotated[Path | None, BeforeValidator(_absolute), _or("none"), _written_or("none")]
Budget = Annotated[Capacity, BeforeValidator(Capacity.parse), PlainSerializer(str)]
SizeBytes = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size)]
OptionalSize = Annotated[
    int | None,
    BeforeValidator(lambda value: None if value is None else parse_size(value)),
    _or("none"),
    _written_or("none", format_size),
]
Seconds = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
Number = Annotated[float, PlainSerializer(_decimal)]
Share = Annotated[Number, Field(ge=0, le=1)]
Switch = Annotated[bool, PlainSerializer(lambda value: "on" if value else "off")]
# None means: what the source shows.
Owner = Annotated[int | None, Field(ge=0, lt=2**32 - 1), _or("source"), _written_or("source")]
Mode = Annotated[
    int | None, BeforeValidator(_octal), _or("source"), _written_or("source", lambda value: f"{value:04o}")
]
# A word means: the scorer calibrates the radius while the training runs.
Radius = Annotated[
    Literal["class", "nearest"] | float,
    BeforeValidator(radius_of),
    PlainSerializer(lambda value: value if isinstance(value, str) else _decimal(value)),
]
Index = Annotated[Literal["auto", "exact", "cells", "hnsw"], AfterValidator(_usable_index)]
# None means: no limit.
SubstitutionLimit = Annotated[int | None, Field(ge=0), _or("unlimited"), _written_or("unlimited")]
Neighbours = Annotated[int | None, Field(ge=1), _or("unlimited"), _written_or("unlimited")]
# Zero means: no limit.
BytesPerSecond = Annotated[
    int,
    Field(le=10**15),
    BeforeValidator(lambda value: 0 if value == "unlimited" else parse_size(value)),
    PlainSerializer(lambda value: format_size(value) if value else "unlimited"),
]
# Empty means: as other programs find it.
Word = Annotated[str, BeforeValidator(lambda value: "" if value == "none" else value), _written_or_none]
Archives = Annotated[str, AfterValidator(_archives), _written_or_none]
Endpoint = Annotated[Word, AfterValidator(_endpoint)]
StreamServer = Annotated[Word, AfterValidator(_stream_server)]
# Addresses of nodes, and the weight of each.
Peers = Annotated[dict[str, float], PlainValidator(_peers), PlainSerializer(_written_peers)]
Forms = Annotated[str, BeforeValidator(_forms)]
Policy = Annotated[str, AfterValidator(_mountable_policy)]
Views = Annotated[dict[str, Recipe], PlainValidator(parse_recipes), PlainSerializer(format_recipes)]
