"""All options of a mount: one frozen model that checks its values once, and the only table of options.

Each field of `Options` is a row of that table: name, type, default, meaning, an example, its group in help texts, and
whether the option can be changed while mounted. The command line, TOML files, `--help`, `.spiderfs/config` and the
documents are made from this table or compared with it. An option has the name of its field, except that a field such
as `source_latency_ms` is the option `source.latency_ms`. A value given by `-o` wins over the TOML file, and the TOML
file wins over the default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from spiderfs.core.memory import least_limit
from spiderfs.errors import ConfigError, SourceAway
from spiderfs.forms.partition import MOST_AUGMENTED, Split
from spiderfs.options import paths, types
from spiderfs.options.mount_strings import options_in
from spiderfs.options.types import AUTO, ONE_FORM, CacheDirectories
from spiderfs.options.units import Capacity, format_size
from spiderfs.protocol.requests import SCHEME
from spiderfs.sources.node_names import as_named, at_address, data_set_of, is_address, live_name
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import OPENERS, identity_of, is_url, open_source, scheme_of, without_secrets
from spiderfs.views.recipe import NO_VIEW, ORIGINAL, READY, Recipe

# The two options that the command line takes as arguments.
ARGUMENTS = ("source", "mountpoint")

# A listing of an object store cannot be compared with an mtime, so it is trusted for as long as names are.
OBJECT_STORE_DEFAULTS = {"dir_ttl": 3600.0}

# Options that the kernel has to do with, and what to do where it has not (`spiderfs serve`).
ONLY_OF_MOUNTS = {
    "immutable": "leave it out; to look names up less often, set ttl=DURATION",
    "allow_other": "leave it out; root and the user who serves may read",
    "binding": "leave it out",
}

# A trace is of one source and one way to cache it: `simulate` replays all that is in the file as one training.
TRACED = ("source", "capacity", "policy", "plan", "archives", "view", "forms", "substitute", "immutable")

# No one writes a longer file of options; the limit ends the reading of a device such as /dev/zero.
_TOML_BYTES = 1 << 20


def default_workers() -> int:
    """The default of the option workers: few, because a training's loader workers need the cores."""
    cores = len(os.sched_getaffinity(0))
    return 1 if cores <= 4 else min(4, cores // 4)


class OptionRow(NamedTuple):
    """One option as a person sees it; `value` is in the form that `-o` takes."""

    name: str
    value: str
    live: bool
    help: str
    group: str = ""


def option(example: object, *, live: bool = False, default_text: str = "", group: str = "", **field: Any) -> Any:
    """One row of the table; `live`: can be changed while mounted. `default_text` says what a default depends on.

    The docstring of the field is its meaning.
    """
    extra: dict[str, Any] = {"live": live, "default_text": default_text, "group": group}
    return Field(examples=[example], json_schema_extra=extra, **field)


# The groups of help texts, in their order, and what makes a row of each.
GROUPS = (
    "Basics",
    "Names, archives and views",
    "Cache and prefetching",
    "Source",
    "Several nodes",
    "Logs and traces",
    "Research and experiments",
)
basic, shown, caching, remote, nodes, logs, research = (partial(option, group=group) for group in GROUPS)


class Options(BaseModel):
    """The values of all options of one mount."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    source: types.SourceName = option("/nfs/imagenet")
    """the directory to show, or a URL: s3://BUCKET/PREFIX, gs:// or az://, hf://datasets/NAME@REVISION/PATH, or
    https://HOST/MANIFEST"""
    mountpoint: types.AbsolutePath = option("/mnt/imagenet")
    """where to show it"""
    cache_dir: types.CachePlaces = basic(
        "/scratch/spiderfs", default_text="/var/cache/spiderfs/HASH as root, else ~/.cache/spiderfs/HASH"
    )
    """directory of the cache, on a local disk; one on each of several disks, with : between them (in TOML a list); one
    mount at a time may use them"""
    # The default is a number of bytes, because a share needs the size of the source, and measuring a million files over
    # NFS takes minutes.
    capacity: types.Budget = basic("20GiB", default=Capacity(10 * 2**30, "bytes"), live=True)
    """how much the cache may hold: a number of bytes, 20GiB, 100MB, or 20% (of the source)"""
    policy: types.Policy = caching("lru", default="spider", live=True)
    """ranks the samples; spider follows the hook, and without a hook keeps the first ones"""
    ttl: types.Seconds = shown("5min", default=3600.0, live=True)
    """how long a name and its attributes are trusted until the next lookup; with immutable, until unmount"""
    negative_ttl: types.Seconds = shown("2s", default=2.0, live=True)
    """how long a name is trusted not to exist"""
    dir_ttl: types.Seconds = shown(
        "1s", default=1.0, live=True, default_text="1s; 1h for an object store, whose directories have no mtime"
    )
    """how long a directory's listing is trusted before opendir compares its mtime; 0s lists again each time"""
    sample_max_bytes: Annotated[types.SizeBytes, Field(gt=0)] = caching("8MiB", default=8 * 2**20)
    """files up to this size are cached whole when they are opened, larger files in blocks of 1 MiB"""
    large_share: types.Share = caching(0.5, default=0.5)
    """share of the capacity that the blocks of large files may take"""
    partials_share: types.Number = caching(0.5, default=0.5, ge=0, le=MOST_AUGMENTED)
    """share of the capacity for partly augmented samples (trainer_hook.refurbish)"""
    binding: Literal["kernel", "pyfuse3"] = research("pyfuse3", default="kernel")
    """FUSE implementation: kernel (spiderfs itself) or pyfuse3 (see docs/reference/bindings.md)"""
    immutable: types.Switch = basic("on", default=False, default_text="off; on for hf://, which shows one commit")
    """files at the source do not change while mounted: names are trusted until unmount, whatever ttl is, and the kernel
    opens files by itself"""
    workers: int = caching(
        2,
        default_factory=default_workers,
        ge=1,
        le=64,
        default_text="1 with up to 4 cores, else a quarter of the cores, at most 4",
    )
    """number of processes that answer the kernel"""
    fetches: int = caching(64, default=64, ge=1, le=1024)
    """concurrent requests of each worker to the source"""
    read_ahead: int = caching(8, default=8, ge=0, le=1024)
    """blocks of 1 MiB prefetched for a sequential reader of a large file; up to 56 while it waits"""
    memory_limit: types.OptionalSize = caching("1GiB", default=None)
    """memory of all processes of the mount together; none: a limit for each kind of bytes in flight"""
    substitute: Literal["off", "trainer", "all"] = caching("off", default="trainer")
    """readers that may get a substitute, a cached sample of the same label, for an uncached one"""
    substitute_when: Literal["late", "miss"] = caching("miss", default="late", live=True)
    """late: substitutes for samples that are neither cached nor being fetched; miss: for all uncached ones"""
    plan: types.Switch = basic("off", default=True, live=True)
    """follow published plans: evict the sample with the latest next use, and prefetch"""
    background_bandwidth: types.BytesPerSecond = caching("100MB", default=0, live=True)
    """bytes per second for prefetches and 'spiderfs warm', except for files that a reader waits for"""
    packages: Literal["off", "source"] = research("source", default="off")
    """write missed samples into packages at the source, for policy=impact"""
    names: types.OptionalPath = shown("/scratch/imagenet.tsv", default=None)
    """file of names, sizes and times or ETags, in place of listing the source: a manifest, or the output of 'aws s3 ls
    --recursive', 'rclone lsjson -R' or S3 Inventory (CSV)"""
    archives: types.Archives = shown("tar", default="")
    """archives that are shown as directories: tar, zip or tar+zip; with +nested also those in archives"""
    views: types.Views = shown("small:jpeg:192:85", default={}, default_text="none")
    """recipes of views, NAME:FORMAT:SHORT_SIDE[:QUALITY] with + between them; in TOML a table [views.NAME] each"""
    view: str = shown(
        "jpeg256",
        default=NO_VIEW,
        description=f"show images in another form: one of `views`, or {', '.join(READY)}; none shows originals",
    )
    forms: types.Forms = caching("50-30-20", default=ONE_FORM)
    """percents of the capacity for originals, views and partly augmented samples; auto: as 'spiderfs profile' found"""
    # They run at the lowest priority.
    view_workers: int = shown(
        2,
        default_factory=lambda: max(1, len(os.sched_getaffinity(0)) // 2),
        ge=1,
        le=256,
        default_text="half of the cores",
    )
    """processes that make views, for each worker and for prefetches"""
    view_megapixels: types.Number = shown(50, default=50.0, gt=0, le=1000)
    """images with more million pixels are shown unchanged"""
    ratio_start: types.Share = research(0.9, default=0.9, live=True)
    """share of the cache for important samples at first; hubs and their substitutes have the rest"""
    ratio_end: types.Share = research(0.8, default=0.8, live=True)
    """the same share after `ratio_epochs` epochs"""
    ratio_epochs: int = research(90, default=100, ge=1, live=True)
    """epochs over which the share falls to ratio_end: about the number of the training run"""
    hub_substitutions: types.SubstitutionLimit = research("unlimited", default=8, live=True)
    """how often a hub may be the substitute in an epoch of a training run; unlimited as in SpiderCache's paper"""
    hub_neighbours: types.Neighbours = research("unlimited", default=64, live=True)
    """how many samples, its nearest ones, a hub may substitute for; unlimited as in SpiderCache's paper"""
    neighbours: int = research(200, default=500, ge=1, le=1000)
    """number of nearest neighbours of a sample that count; 500 as in SpiderCache's paper"""
    embeddings: Literal["unit", "raw"] = research("raw", default="unit")
    """embeddings for the scorer: scaled to length 1, or raw ones, which need `HookOptions(embeddings='raw')` too"""
    radius: types.Radius = research(0.5, default="nearest")
    """distance below which two samples are neighbours (0 to 2 for unit embeddings); class: by `radius_share`; nearest:
    each epoch the median of the nearest of a label"""
    radius_share: types.Number = research(0.05, default=0.01, gt=0, lt=1)
    """with `radius=class`: the share of the pairs of samples of one class that are neighbours"""
    index: types.Index = research("hnsw", default="auto")
    """search for neighbours: exact compares with all samples, cells and hnsw (needs hnswlib) with the likely ones; auto
    is exact up to 50,000 samples, and cells above"""
    uid: types.Owner = shown(1000, default=None)
    """owner shown for every file"""
    gid: types.Owner = shown(1000, default=None)
    """group shown for every file"""
    file_mode: types.Mode = shown("0444", default=None)
    """permissions shown for every file, octal"""
    dir_mode: types.Mode = shown("0555", default=None)
    """permissions shown for every directory, octal"""
    allow_other: types.Switch = basic("on", default=False)
    """let other users read the mount too"""
    exec: types.Switch = shown("off", default=True)
    """let programs in the mount be run; `noexec` is the same as exec=off"""
    log_level: Literal["debug", "info", "warning", "error"] = logs("info", default="info")
    """the least serious messages that are logged"""
    log_file: types.OptionalPath = logs("/var/log/spiderfs.log", default=None)
    """file to log to instead of the system's log; at 10 MiB it is renamed to FILE.1"""
    trace: types.OptionalPath = logs("/tmp/epoch.trace", default=None)
    """record every access in this file, for 'spiderfs simulate'; later mounts with the same options append"""
    trace_embeddings: types.Switch = research("off", default=True)
    """trace embeddings too, for 'spiderfs simulate --radius': about 140 bytes a sample and epoch"""
    access_log: types.Switch = logs("off", default=True)
    """list recent accesses in .spiderfs/log"""
    source_latency_ms: types.Number = research(5, default=0.0, ge=0, le=3_600_000, live=True)
    """for experiments: milliseconds that every request to the source takes longer"""
    source_bandwidth: types.BytesPerSecond = remote("100MB", default=0, live=True)
    """bytes per second from the source; requests that wait longer than source.timeout_s for their turn fail"""
    source_timeout_s: types.Number = remote(30, default=30.0, gt=0, le=86_400)
    """time limit of a request to the source, in seconds"""
    source_attempts: int = remote(4, default=4, ge=1, le=100)
    """attempts of a request before a reader gets an error"""

    peers: types.Peers = nodes("http://n1:8443+http://n2:8443", default={}, default_text="none", live=True)
    """nodes that share caches, with this one: URLs of web servers over their mounts, joined by + (URL*WEIGHT by
    capacity), one URL for all addresses of its host, or cluster/NAME for nodes registered in `cluster`; or Redis
    servers that hold samples for all nodes, redis://n1:6379/NAME (*0.4: share)"""
    peer_self: types.Endpoint = nodes("http://n1:8443", default="")
    """this node in `peers`; none: found by the addresses of this machine, or http://HOSTNAME:8443 with
    peers=cluster/NAME"""
    peer_timeout: types.Seconds = nodes("200ms", default=0.2, gt=0, le=60)
    """time limit of a request to another node, before the source is read; longer while the source is slower"""
    cluster: types.StreamServer = nodes("redis://user@n1:6379", default="")
    """Redis or Valkey server (rediss:// with TLS) by which nodes share scores and plans; password in REDISCLI_AUTH"""

    source_endpoint: types.Endpoint = remote("https://minio.example.org:9000", default="")
    """URL of a store other than Amazon's, or of another hub; none: from the store's own variables and files"""
    source_region: types.Word = remote("eu-central-1", default="")
    """region of the bucket; none: looked up at Amazon"""
    source_profile: types.Word = remote("training", default="")
    """profile of ~/.aws/config for credentials; none: the default ones"""
    source_anonymous: types.Switch = remote("on", default=False)
    """use no credentials, for public buckets"""
    source_requester_pays: types.Switch = remote("on", default=False)
    """pay for reads, in buckets that require it"""
    source_addressing: Literal["auto", "path", "virtual"] = remote("path", default="auto")
    """place of the bucket's name in requests: the path, or (virtual) the host"""

    @model_validator(mode="before")
    @classmethod
    def _give_defaults(cls, values: Any) -> Any:
        """Give what follows from the kind of the source, and as many workers as the binding can serve with."""
        if isinstance(values, dict) and str(values.get("source", "")).startswith("hf://"):
            # It is shown at one commit, which does not change.
            values = {"immutable": values.get("binding") != "pyfuse3", **values}
        if isinstance(values, dict) and "cache_dir" not in values and values.get("source"):
            place = StoreSettings(str(values.get("source_endpoint", "")), profile=str(values.get("source_profile", "")))
            values = {**values, "cache_dir": paths.default_cache_dir(identity_of(values["source"], place))}
        if isinstance(values, dict) and (is_url(values.get("source", "")) or values.get("names", "none") != "none"):
            values = {**OBJECT_STORE_DEFAULTS, **values}
        if isinstance(values, dict) and "workers" not in values and values.get("binding") == "pyfuse3":
            values = {**values, "workers": 1}
        return values

    @field_validator("*")
    @classmethod
    def _check_beside_others(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError if the value does not go with those of the fields above."""
        of, reason, has_view = info.data, "", info.field_name == "view" and value != NO_VIEW
        is_native, scheme = of.get("binding") != "pyfuse3", scheme_of(of.get("source", ""))
        setting = str(info.field_name).removeprefix("source_")
        match info.field_name:
            case "workers" if value > 1 and not is_native:
                reason = "binding=pyfuse3 serves with one worker: leave out workers, or mount with -o binding=kernel"
            case "memory_limit" if value is not None and {"workers", "sample_max_bytes"} <= of.keys():
                workers, size = of["workers"], of["sample_max_bytes"]
                if value < (least := least_limit(workers, size)):
                    reason = (
                        f"with workers={workers} and sample_max_bytes={format_size(size)}, the processes and a file in"
                        f" flight in each need {format_size(least)}: write at least that, or lower one of the two"
                    )
            case "immutable" if value and not is_native:
                reason = "pyfuse3 hides the file of a READ: leave out immutable, or mount with -o binding=kernel"
            case "radius" if isinstance(value, float) and value > 2 and of.get("embeddings") == "unit":
                reason = "unit embeddings are 2 apart at most: give up to 2, or mount with -o embeddings=raw"
            case "index" if value == "cells" and of.get("embeddings") == "raw":
                reason = "cells hold unit embeddings: choose index=exact or hnsw, or leave out embeddings=raw"
            case "packages" if value != "off" and is_url(of.get("source", "")):
                reason = "packages are files in a directory, and an object store is only read: leave out packages"
            case "names" if value is not None and scheme in ("hf", "http", "https"):
                reason = f"{scheme}:// has a list of its own: leave out names"
            case "archives" if value and of.get("packages") != "off":
                reason = "packages are made of files, and not of members of archives: leave out one of both"
            case "view" if has_view and value not in (known := {**READY, **of.get("views", {})}):
                reason = f"there is no view {value}: choose one of {', '.join(known)}, or describe it with views"
            case "view" if has_view and not is_native:
                reason = "pyfuse3 cannot list files of an unknown size: leave out view, or binding=pyfuse3"
            case "view" if has_view and of.get("packages") != "off":
                reason = "packages hold originals: leave out view, or packages"
            case "forms" if value not in (ONE_FORM, AUTO) and Split.parse(value).decoded and of.get("view") == NO_VIEW:
                reason = "the second percent is that of views: write 0 there, or choose a view with view=NAME"
            case "peers" if value and of.get("view") != NO_VIEW:
                reason = "nodes give each other originals, and the root shows a view: leave out view, or peers"
            case "peer_self" if value and not data_set_of(peers := of.get("peers", {})) and value not in peers:
                host = as_named(value).host
                if not (is_address(host) and at_address(live_name(peers), host).url == value):
                    reason = "peers does not name this node: write it there too, in the same way"
            case "cluster" if not value and data_set_of(of.get("peers", {})):
                reason = "peers needs a server by which nodes find each other: write cluster=redis://n1:6379"
            case "source_endpoint" | "source_region" | "source_profile" | "source_anonymous" | "source_requester_pays":
                if value and setting not in OPENERS[scheme].settings:
                    kinds = " and ".join(f"{kind}://" for kind, opener in OPENERS.items() if setting in opener.settings)
                    source = f"{scheme}://" if scheme else "a directory"
                    reason = f"this is for {kinds}, and the source is {source}: leave it out"
        if reason:
            raise ValueError(reason)
        return value

    @property
    def store_settings(self) -> StoreSettings:
        """How the source is reached, if it is an object store."""
        return StoreSettings(
            endpoint=self.source_endpoint,
            region=self.source_region,
            profile=self.source_profile,
            anonymous=self.source_anonymous,
            requester_pays=self.source_requester_pays,
            addressing=self.source_addressing,
            timeout_s=self.source_timeout_s,
            names_by_time=self.names is not None,
        )

    @property
    def archive_kinds(self) -> list[str]:
        """The kinds of archives that are shown as directories."""
        return [kind for kind in self.archives.split("+") if kind not in ("", types.NESTED)]

    @property
    def archive_depth(self) -> int:
        """How many archives may lie in each other, to be shown as directories."""
        return 0 if not self.archives else 2 if types.NESTED in self.archives else 1

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipes of all views that the mount has; none with pyfuse3, which cannot list files of unknown sizes."""
        return {} if self.binding == "pyfuse3" else {**READY, **self.views}

    @property
    def shown_form(self) -> str:
        """The name of the view that the root shows, or ORIGINAL."""
        return ORIGINAL if self.view == NO_VIEW else self.view

    @classmethod
    def load(
        cls,
        cli: Sequence[str] = (),
        toml: Path | None = None,
        source: str | Path | None = None,
        mountpoint: str | Path | None = None,
        warn: Callable[[str], object] | None = None,
        *,
        is_mount: bool = True,
    ) -> Options:
        """The options of a mount that is about to start; `cli` holds the string of each `-o`.

        Unless it `is_mount`, `mountpoint` is the path of a socket, and options that concern a mount alone are refused.
        Raises ConfigError if an option or the source is wrong, MountError if the mount point cannot be used. `warn`
        is called with a warning of an object store that does not answer, if the cache knows names of it: they can be
        shown meanwhile.
        """
        origins: dict[str, str] = {}
        values: dict[str, object] = {}
        if toml is not None:
            origin = f"{toml}: "
            for name, setting in _read_toml(toml).items():
                field = _field_of(name, origin)
                values[field], origins[field] = setting, origin
        for name, value in options_in(cli):
            info = cls.model_fields[field := _field_of(name, "")]
            # Only a switch may come without a value, which means `on`.
            if value is None and info.annotation is not bool:
                raise ConfigError(f"{name} needs a value: write it like {name}={(info.examples or [''])[0]}")
            values[field], origins[field] = value if value is not None else "on", ""
        for field, path in zip(ARGUMENTS, (source, mountpoint), strict=True):
            if path is not None:
                values[field], origins[field] = path, ""
            elif field not in values:
                usage = "mount SOURCE MOUNTPOINT" if is_mount else "serve SOURCE --name NAME"
                raise ConfigError(
                    f"no {field} is named: write 'spiderfs {usage}', or '{field} = ...' in a --config file"
                )
        if "partials_share" in values and values.get("forms", ONE_FORM) != ONE_FORM:
            raise ConfigError("forms also limits augmented samples: leave out partials_share, or forms")
        named = str(values["source"])
        paths.check_source_name(named)
        if not is_url(named):
            paths.check_source_answers(named, lambda: os.scandir(named).close())
        if is_mount and str(values["mountpoint"]).startswith(SCHEME):
            place = str(values["mountpoint"])
            name = place.removeprefix(SCHEME).partition("/")[0] or "NAME"
            raise ConfigError(
                f"{place} is no mount point: name a directory, or serve it with 'spiderfs serve --name {name}'"
            )
        options = _validated(values, origins)
        if not is_mount:
            # What is shown at one commit is immutable by default.
            options = options.model_copy(update={"immutable": False}) if "immutable" not in values else options
            for field, advice in ONLY_OF_MOUNTS.items():
                if getattr(options, field) != Options.model_fields[field].default:
                    raise ConfigError(f"{field} needs a mount, and there is none: {advice}")
        paths.check_paths(options.source, options.mountpoint if is_mount else None, options.cache_dir.all)
        if is_url(options.source):
            store = open_source(options.source, options.store_settings)
            try:
                paths.check_source_answers(options.source, lambda: store.stat(b""))
            except SourceAway as exc:
                if warn is None or not paths.knows_names_of(options.cache_dir.first, store.identity):
                    raise
                warn(f"{exc}; until it answers, the mount shows cached names")
        return options

    def changed(self, name: str, value: str) -> Options:
        """These options with one of them changed while mounted; raises ConfigError if that option cannot be changed."""
        field = _field_of(name, "")
        if not _is_live(Options.model_fields[field]):
            raise ConfigError(f"{name} cannot be changed while mounted: unmount, then mount with -o {name}={value}")
        return _validated({**{key: getattr(self, key) for key in Options.model_fields}, field: value}, {})

    def as_table(self) -> list[OptionRow]:
        written = self.model_dump()
        return [
            OptionRow(
                option_name(name),
                str(written[name]),
                _is_live(row),
                _one_line(row.description or ""),
                _extra(row)["group"],
            )
            for name, row in Options.model_fields.items()
        ]

    def number_for_traces(self) -> int:
        """A number other than 0 for what makes the accesses of two mounts belong to one trace."""
        values = [str(value) for value in self.model_dump(include=set(TRACED)).values()]
        return zlib.crc32("\0".join(values).encode(errors="surrogateescape")) or 1

    def slow_settings(self) -> dict[str, float]:
        """The settings of `sources.slow`, by the names that they have there; if both are 0, the source is as it is."""
        live = (field for field, info in Options.model_fields.items() if field.startswith("source_") and _is_live(info))
        return {field.removeprefix("source_"): float(getattr(self, field)) for field in live}


def default_rows() -> list[OptionRow]:
    """All options but source and mountpoint by groups, with their defaults in words, for help texts."""
    rows = sorted(_all_defaults().as_table(), key=lambda row: GROUPS.index(row.group) if row.group else -1)
    words = {option_name(field): _extra(info).get("default_text") for field, info in Options.model_fields.items()}
    return [row._replace(value=str(words[row.name] or row.value)) for row in rows if row.name not in ARGUMENTS]


def check_change(name: str, value: str) -> None:
    """Raise ConfigError if no mount would accept this change of an option while mounted; its message is the reason."""
    # Whether the mount has a server of `cluster`, it knows alone.
    _all_defaults().model_copy(update={"cluster": "redis://n1"}).changed(name, value)


def option_name(field: str) -> str:
    """The name of the option that sets a field of Options."""
    return field.replace("source_", "source.", 1) if field.startswith("source_") else field


def _all_defaults() -> Options:
    """Options with all defaults and made-up paths, for questions whose answer does not depend on paths."""
    places = CacheDirectories(Path("/cache"))
    return Options(source=Path("/source"), mountpoint=Path("/mountpoint"), cache_dir=places)


def _field_of(name: str, origin: str) -> str:
    """The field that an option sets; raises ConfigError, which names the most similar option, if there is none."""
    fields = {option_name(field): field for field in Options.model_fields}
    if name in fields:
        return fields[name]
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else "'spiderfs mount --help' lists them all"
    raise ConfigError(f"{origin}unknown option {_one_line(name)}: {remedy}")


def _validated(values: Mapping[str, object], origins: Mapping[str, str]) -> Options:
    try:
        return Options.model_validate(values)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = str(first["loc"][0])
        name = option_name(field)
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"].startswith("bool"):
            reason = "write on or off"
        elif first["type"] != "value_error":
            example = (Options.model_fields[field].examples or [""])[0]
            reason = f"{reason[0].lower()}{reason[1:]}, for example {name}={example}"
        raise ConfigError(
            f"{origins.get(field, '')}{name}={without_secrets(_one_line(values.get(field)))}: {_one_line(reason)}"
        ) from exc


def _read_toml(path: Path) -> dict[str, object]:
    """The options in a TOML file by name; a table [source] holds the options `source.*`, and the source as `path`."""
    try:
        with open(path, "rb") as file:
            content = file.read(_TOML_BYTES + 1)
        if len(content) > _TOML_BYTES:
            raise ConfigError(f"{path} is longer than {_TOML_BYTES} bytes: choose a TOML file of options with --config")
        document = tomllib.loads(content.decode())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read ({exc.strerror}): choose a readable file with --config") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not TOML ({_one_line(exc)}): correct the file") from exc
    table = document.get("source")
    if isinstance(table, dict):
        del document["source"]
        document |= {"source" if key == "path" else f"source.{key}": value for key, value in table.items()}
    return document


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _is_live(info: FieldInfo) -> bool:
    return _extra(info).get("live") is True


def _extra(info: FieldInfo) -> Mapping[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
