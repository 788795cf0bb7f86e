"""Every option of a mount: one frozen model, validated once, and the only table of options there is.

Each field of `Options` is one row of that table: name, type, default, meaning, example, and whether it can be changed
while mounted. The command line, TOML files, `--help`, `.spiderfs/config` and the README are all rendered from it or
checked against it. A field `source_latency_ms` is the option `source.latency_ms`; the names of all others are their
own. Values come from `-o`, then the TOML file, then the defaults.

The module is long because the table is: half of it is the fields.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from spiderfs.errors import ConfigError
from spiderfs.options.mount_strings import options_in
from spiderfs.options.paths import check_answers, check_places, default_cache_dir
from spiderfs.options.types import (
    AbsolutePath,
    Budget,
    BytesPerSecond,
    Mode,
    Number,
    OptionalPath,
    Owner,
    Policy,
    Radius,
    Seconds,
    SizeBytes,
    Switch,
)
from spiderfs.options.units import Capacity, parse_duration, parse_size

# The whole vocabulary of options comes from here; where a value's syntax is defined is of no interest outside.
__all__ = ["Capacity", "OptionRow", "Options", "check_change", "default_rows", "parse_duration", "parse_size"]

# What is shown and where: the two that the command line takes as arguments.
PLACES = ("source", "mountpoint")

LIVE: dict[str, Any] = {"live": True}
# No file of options is so long, and no device (/dev/zero) is read for ever.
_TOML_BYTES = 1 << 20


def default_workers() -> int:
    """Few, for a trainer's own loaders want the cores."""
    cores = len(os.sched_getaffinity(0))
    return 1 if cores <= 4 else min(4, cores // 4)


class OptionRow(NamedTuple):
    """One option as a person sees it; `value` is written the way it would be given."""

    name: str
    value: str
    live: bool
    help: str


class Options(BaseModel):
    """Everything that can be set for one mount."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    source: AbsolutePath = Field(description="the directory to show", examples=["/nfs/imagenet"])
    mountpoint: AbsolutePath = Field(description="where to show it", examples=["/mnt/imagenet"])
    cache_dir: AbsolutePath = Field(
        description="directory of the cache, on a local disk; one mount at a time may use it",
        examples=["/scratch/spiderfs"],
        json_schema_extra={"default_text": "/var/cache/spiderfs/HASH as root, else ~/.cache/spiderfs/HASH"},
    )
    # A fixed default: a share would mean measuring the source first, which takes minutes over NFS with a million files.
    capacity: Budget = Field(
        default=Capacity(10 * 2**30, "bytes"),
        description="what the cache may hold: bytes, 20GiB, 100MB, or 20% of the source",
        examples=["20GiB"],
        json_schema_extra=LIVE,
    )
    policy: Policy = Field(
        default="spider",
        description="what the cache keeps; spider follows the trainer's hook, and without one keeps what came first",
        examples=["lru"],
        json_schema_extra=LIVE,
    )
    ttl: Seconds = Field(
        default=3600.0,
        description="how long a name and its attributes are trusted before the source is asked again",
        examples=["5min"],
        json_schema_extra=LIVE,
    )
    negative_ttl: Seconds = Field(
        default=2.0,
        description="how long a name is trusted not to exist",
        examples=["2s"],
        json_schema_extra=LIVE,
    )
    dir_ttl: Seconds = Field(
        default=1.0,
        description="how long a directory's list is trusted before its mtime is compared at the next opendir",
        examples=["1s"],
        json_schema_extra=LIVE,
    )
    sample_max_bytes: Annotated[SizeBytes, Field(gt=0)] = Field(
        default=8 * 2**20,
        description="files up to this size are cached whole at open, larger ones by blocks of 1 MiB",
        examples=["8MiB"],
    )
    large_share: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of the capacity that blocks of larger files may take",
        examples=[0.5],
    )
    workers: int = Field(
        default_factory=default_workers,
        ge=1,
        le=64,
        description="processes that answer the kernel",
        examples=[2],
        json_schema_extra={"default_text": "1 on up to 4 cores, else a quarter of them but at most 4"},
    )
    fetches: int = Field(
        default=16, ge=1, le=1024, description="requests to the source at one time, per worker", examples=[16]
    )
    read_ahead: int = Field(
        default=8, ge=0, le=1024, description="blocks of 1 MiB fetched ahead of a reader of a large file", examples=[8]
    )
    substitute: Literal["off", "trainer", "all"] = Field(
        default="trainer",
        description="who may be given a cached neighbour of the same class for a missing sample",
        examples=["off"],
    )
    substitute_when: Literal["late", "miss"] = Field(
        default="late",
        description="substitute only what nobody has begun to fetch (late), or everything that is not cached (miss)",
        examples=["miss"],
        json_schema_extra=LIVE,
    )
    plan: Switch = Field(
        default=True,
        description="act on the plans that trainers publish: evict by next use, fetch ahead",
        examples=["off"],
        json_schema_extra=LIVE,
    )
    packages: Literal["off", "source"] = Field(
        default="off", description="pack missed files at the source, for policy=impact", examples=["source"]
    )
    ratio_start: Number = Field(
        default=0.9,
        ge=0,
        le=1,
        description="share of the important samples in the cache at first; hubs that stand in for others have the rest",
        examples=[0.9],
        json_schema_extra=LIVE,
    )
    ratio_end: Number = Field(
        default=0.8,
        ge=0,
        le=1,
        description="that share after `ratio_epochs` epochs",
        examples=[0.8],
        json_schema_extra=LIVE,
    )
    ratio_epochs: int = Field(
        default=100,
        ge=1,
        description="epochs over which the share comes down: about as many as the training has",
        examples=[90],
        json_schema_extra=LIVE,
    )
    radius: Radius = Field(
        default=None,
        description="distance (0 to 2) below which two samples are neighbours; auto follows the embeddings",
        examples=[0.5],
    )
    uid: Owner = Field(default=None, description="owner shown for every file", examples=[1000])
    gid: Owner = Field(default=None, description="group shown for every file", examples=[1000])
    file_mode: Mode = Field(default=None, description="permissions shown for every file, octal", examples=["0444"])
    dir_mode: Mode = Field(default=None, description="permissions shown for every directory, octal", examples=["0555"])
    allow_other: Switch = Field(
        default=False, description="let users other than the one who mounts read it", examples=["on"]
    )
    exec: Switch = Field(
        default=True, description="let programs in it be run; `noexec` is the same as exec=off", examples=["off"]
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least serious messages that are logged", examples=["info"]
    )
    log_file: OptionalPath = Field(
        default=None, description="file to log to instead of the system's log", examples=["/var/log/spiderfs.log"]
    )
    trace: OptionalPath = Field(
        default=None,
        description="record every access in this file, for 'spiderfs simulate'",
        examples=["/tmp/epoch.trace"],
    )
    trace_embeddings: Switch = Field(
        default=True,
        description="record embeddings too, for 'spiderfs simulate --radius': about 160 bytes a sample and epoch",
        examples=["off"],
    )
    access_log: Switch = Field(default=True, description="keep recent accesses in .spiderfs/log", examples=["off"])
    source_latency_ms: Number = Field(
        default=0.0,
        ge=0,
        le=3_600_000,
        description="for trying things out: time added to every request to the source",
        examples=[5],
        json_schema_extra=LIVE,
    )
    source_latency_jitter: Number = Field(
        default=0.0,
        ge=0,
        le=5,
        description="random spread of that time: sigma of a lognormal factor on it",
        examples=[0.2],
        json_schema_extra=LIVE,
    )
    source_bandwidth: BytesPerSecond = Field(
        default=0,
        description="for trying things out: bytes per second that the source delivers at most",
        examples=["100MB"],
        json_schema_extra=LIVE,
    )
    source_error_rate: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description="for trying things out: share of requests to the source that fail",
        examples=[0.01],
        json_schema_extra=LIVE,
    )
    source_hang: Switch = Field(
        default=False,
        description="for trying things out: requests to the source never return",
        examples=["on"],
        json_schema_extra=LIVE,
    )
    source_gone: Switch = Field(
        default=False,
        description="for trying things out: the source cannot be reached",
        examples=["on"],
        json_schema_extra=LIVE,
    )
    source_timeout_s: Number = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="seconds after which a request to the source is given up",
        examples=[30],
    )
    source_attempts: int = Field(
        default=4, ge=1, le=100, description="how often a request is tried before a reader sees an error", examples=[4]
    )

    @model_validator(mode="before")
    @classmethod
    def _give_default_cache_dir(cls, values: Any) -> Any:
        if isinstance(values, dict) and "cache_dir" not in values and values.get("source"):
            return {**values, "cache_dir": default_cache_dir(values["source"])}
        return values

    @classmethod
    def load(
        cls,
        cli: Sequence[str] = (),
        toml: Path | None = None,
        source: str | Path | None = None,
        mountpoint: str | Path | None = None,
    ) -> Options:
        """The options of a mount that is about to start; `cli` has one string per `-o`.

        Raises ConfigError for a wrong option or source, MountError for a mount point that cannot be used.
        """
        origins: dict[str, str] = {}
        values: dict[str, object] = {}
        if toml is not None:
            origin = f"{toml}: "
            for name, setting in _read_toml(toml).items():
                field = _field_of(name, origin)
                values[field], origins[field] = setting, origin
        for name, word in options_in(cli):
            field = _field_of(name, "")
            values[field], origins[field] = _value_of(field, name, word), ""
        for field, path in zip(PLACES, (source, mountpoint), strict=True):
            if path is not None:
                values[field], origins[field] = path, ""
            elif field not in values:
                raise ConfigError(f"no {field}: name it on the command line, or as '{field} = ...' in a --config file")
        check_answers(str(values["source"]))
        options = _validated(values, origins)
        check_places(options.source, options.mountpoint, options.cache_dir)
        return options

    def changed(self, name: str, value: str) -> Options:
        """These options with one changed while mounted; raises ConfigError with the reason where it cannot be."""
        field = _field_of(name, "")
        if not _is_live(Options.model_fields[field]):
            raise ConfigError(f"{name} cannot be changed while mounted: unmount, and mount with -o {name}={value}")
        return _validated({**{key: getattr(self, key) for key in Options.model_fields}, field: value}, {})

    def as_table(self) -> list[OptionRow]:
        """Every option with its value."""
        written = self.model_dump()
        return [
            OptionRow(option_name(field), str(written[field]), _is_live(info), info.description or "")
            for field, info in Options.model_fields.items()
        ]

    def source_faults(self) -> dict[str, float]:
        """The settings of `sources.faults` by their names there; all zero means an untouched source."""
        live = (field for field, info in Options.model_fields.items() if field.startswith("source_") and _is_live(info))
        return {field.removeprefix("source_"): float(getattr(self, field)) for field in live}


def default_rows() -> list[OptionRow]:
    """Every option with its default in words, for help texts; source and mountpoint are left out."""
    rows = _somewhere().as_table()
    words = {option_name(field): _extra(info).get("default_text") for field, info in Options.model_fields.items()}
    return [row._replace(value=str(words[row.name] or row.value)) for row in rows if row.name not in PLACES]


def check_change(name: str, value: str) -> None:
    """Raise ConfigError, with the reason, where no mount could take this live change."""
    _somewhere().changed(name, value)


def option_name(field: str) -> str:
    """The option that a field of Options is set by."""
    return field.replace("source_", "source.", 1) if field.startswith("source_") else field


def _somewhere() -> Options:
    """The defaults, for questions that do not depend on the places."""
    return Options(source=Path("/source"), mountpoint=Path("/mountpoint"), cache_dir=Path("/cache"))


def _field_of(name: str, origin: str) -> str:
    """The field that an option sets; an unknown one is a ConfigError that names the nearest."""
    fields = {option_name(field): field for field in Options.model_fields}
    if name in fields:
        return fields[name]
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else "see 'spiderfs mount --help' for all of them"
    raise ConfigError(f"{origin}unknown option {_one_line(name)}: {remedy}")


def _value_of(field: str, name: str, word: str | None) -> str:
    """The value of a word of `-o`; a switch may stand alone."""
    info = Options.model_fields[field]
    if word is not None:
        return word
    if info.annotation is bool:
        return "on"
    raise ConfigError(f"{name} needs a value: write it like {name}={(info.examples or [''])[0]}")


def _validated(values: Mapping[str, object], origins: Mapping[str, str]) -> Options:
    try:
        return Options.model_validate(values)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = str(first["loc"][0])
        name = option_name(field)
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":
            example = (Options.model_fields[field].examples or [""])[0]
            reason = f"{reason[0].lower()}{reason[1:]}, for example {name}={example}"
        raise ConfigError(
            f"{origins.get(field, '')}{name}={_one_line(values.get(field))}: {_one_line(reason)}"
        ) from exc


def _read_toml(path: Path) -> dict[str, object]:
    """Options of a TOML file by name; a table [source] gives `source.*`, and the source itself as its `path`."""
    try:
        with open(path, "rb") as file:
            content = file.read(_TOML_BYTES + 1)
        if len(content) > _TOML_BYTES:
            raise ConfigError(f"{path} is longer than {_TOML_BYTES} bytes: name a TOML file of options with --config")
        document = tomllib.loads(content.decode())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read ({exc.strerror}): name a readable file with --config") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not TOML: {_one_line(exc)}: correct it there") from exc
    table = document.get("source")
    if isinstance(table, dict):
        del document["source"]
        document |= {"source" if key == "path" else f"source.{key}": value for key, value in table.items()}
    return document


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _is_live(info: FieldInfo) -> bool:
    return _extra(info).get("live") is True


def _extra(info: FieldInfo) -> Mapping[str, object]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
