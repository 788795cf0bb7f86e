"""Options: precedence, the ways to write a value, and what a person is told about a wrong one."""

from __future__ import annotations

import itertools
import math
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fakes import MemorySource
from spiderfs.errors import ConfigError, SourceDenied, SourceUnavailable, SpiderfsError
from spiderfs.options.model import GROUPS, Options, check_change, default_rows
from spiderfs.options.paths import capacity_remark, missing_remark
from spiderfs.options.units import (
    MAX_SIZE_BYTES,
    SIZE_UNITS,
    Capacity,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import OPENERS, Opener
from spiderfs.sources.source import SourceStat
from spiderfs.views.recipe import READY, Recipe


class Paths(NamedTuple):
    source: Path
    mountpoint: Path
    cache_dir: Path

    def load(self, *cli: str, toml: Path | None = None) -> Options:
        return Options.load([f"cache_dir={self.cache_dir}", *cli], toml, self.source, self.mountpoint)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "source", tmp_path / "mnt", tmp_path / "cache")
    for place in made:
        place.mkdir()
    return made


@given(st.integers(0, MAX_SIZE_BYTES))
def test_a_written_size_reads_back_unchanged(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["0", "200", "20GB", "100MB", "20GiB", "1536MiB", "1kB"])
def test_a_size_is_written_as_a_person_would(text: str) -> None:
    assert format_size(parse_size(text)) == text


@given(st.integers(0, 2**20), st.sampled_from(sorted(SIZE_UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(count: int, unit: str, space: str) -> None:
    assert parse_size(f"{count}{space}{unit}") == parse_size(f"{count}{unit.lower()}") == count * SIZE_UNITS[unit]


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_refusal_in_one_line(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError as exc:
        refusal = str(exc)
    else:
        assert 0 <= size <= MAX_SIZE_BYTES
        return
    assert "write" in refusal
    assert len(refusal.splitlines()) == 1


@given(st.floats(0, 1e9).map(lambda seconds: round(seconds, 6)))
def test_a_written_duration_reads_back_unchanged(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5min", 300),
        ("5m", 300),
        ("1h", 3600),
        ("1d", 86400),
        ("250ms", 0.25),
        ("2", 2),
        ("inf", math.inf),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "source_bytes", "budget"),
    [("20GiB", 0, 20 * 2**30), ("100MB", 5, 10**8), ("4096", 0, 4096), ("20%", 1000, 200), ("2.5%", 1000, 25)],
)
def test_capacity_is_bytes_or_a_share_of_the_source(text: str, source_bytes: int, budget: int) -> None:
    capacity = Capacity.parse(text)
    assert capacity.budget_bytes(source_bytes) == budget
    assert Capacity.parse(str(capacity)) == capacity


@pytest.mark.parametrize("text", ["0", "0%", "101%", "%", "x%", "-1GiB", "1XB", "0.5", "", "nan", "9" * 400])
def test_an_impossible_capacity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        Capacity.parse(text)


@pytest.mark.parametrize(
    ("text", "kept", "said"),
    [
        ("200", False, "capacity=200 is 200 bytes: write a size with its unit, such as 20GiB"),
        ("500000", False, "capacity=500kB is 500000 bytes: write a size with its unit, such as 20GiB"),
        ("500kB", False, ""),
        ("836KiB", False, ""),
        ("1MiB", False, ""),
        ("40GiB", False, "capacity=40GiB is more than the 30.0 GiB that are free on the disk of CACHE: the cache will"),
        ("40GiB", True, ""),
        ("900TiB", True, "capacity=900TiB is more than the 50.0 GiB of the whole disk of CACHE: the cache will hold"),
        ("50%", False, ""),
    ],
)
def test_a_capacity_that_can_hardly_be_meant_is_remarked_on(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, text: str, kept: bool, said: str
) -> None:
    asked = []

    def disk_usage(place: Path) -> tuple[int, int, int]:
        asked.append(place)
        return 50 << 30, 20 << 30, 30 << 30

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    if kept:
        (paths.cache_dir / "store").mkdir()
    else:
        paths.cache_dir.rmdir()
    remark = capacity_remark(Capacity.parse(text), paths.cache_dir).replace(str(paths.cache_dir), "CACHE")
    assert remark.startswith(said)
    assert bool(remark) == bool(said)
    assert "\n" not in remark
    assert set(asked) <= {paths.cache_dir if kept else paths.cache_dir.parent}


def test_a_cache_on_several_disks_is_a_list_of_directories(paths: Paths, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "job:1" / "b"
    options = Options.load([f"cache_dir={a}:{b}"], None, paths.source, paths.mountpoint)
    assert (options.cache_dir.first, options.cache_dir.others) == (a, (b,))
    assert Options.load([f"{row.name}={row.value}" for row in options.as_table()]) == options
    toml = tmp_path / "mount.toml"
    toml.write_text(f'cache_dir = ["{a}", "{b}"]\n')
    assert Options.load((), toml, paths.source, paths.mountpoint).cache_dir == options.cache_dir
    for wrong, said in (
        (f"{a}:{tmp_path}/./a", "a directory is named twice"),
        ("", "the path is empty"),
        (f"{a}:{paths.source}/inside", "lies inside the source"),
        (f"{a}:{toml}", "is not a directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            Options.load([f"cache_dir={wrong}"], None, paths.source, paths.mountpoint)
    for listed in ("[]", "[1]", "1"):
        toml.write_text(f"cache_dir = {listed}\n")
        with pytest.raises(ConfigError, match="this is not the path of a directory"):
            Options.load((), toml, paths.source, paths.mountpoint)


def test_a_capacity_is_compared_with_the_room_of_all_disks(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (other := tmp_path / "other").mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda place: (50 << 30, 20 << 30, 30 << 30))
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_dev=path == other, st_mode=stat.S_IFDIR))
    assert capacity_remark(Capacity.parse("90GiB"), paths.cache_dir, other) == ""
    said = capacity_remark(Capacity.parse("110GiB"), paths.cache_dir, other)
    assert "more than the 100.0 GiB of the whole disks" in said


def test_directories_that_are_missing_are_remarked_on(tmp_path: Path) -> None:
    assert missing_remark([]) == missing_remark([tmp_path]) == ""
    assert missing_remark([tmp_path, tmp_path / "a"]).startswith(f"the cache goes without {tmp_path}/a: mount the disk")


def test_the_command_line_beats_the_file_and_the_file_the_defaults(paths: Paths, tmp_path: Path) -> None:
    toml = tmp_path / "mount.toml"
    toml.write_text('capacity = "1GiB"\nttl = "5min"\nfile_mode = 0o440\n[source]\npath = "/nowhere"\nlatency_ms = 5\n')
    options = paths.load("capacity=2GiB,allow_other", "ttl=1min", "ttl=2min", toml=toml)
    assert options.source == paths.source  # the argument, not the file's path
    assert options.capacity == Capacity(2 * 2**30, "bytes")
    assert options.ttl == 120  # the last -o wins
    assert (options.file_mode, options.source_latency_ms) == (0o440, 5)  # the file's
    assert (options.negative_ttl, options.policy) == (2, "spider")  # the defaults'
    assert options.allow_other


def test_a_file_alone_can_describe_a_mount(paths: Paths, tmp_path: Path) -> None:
    toml = tmp_path / "mount.toml"
    toml.write_text(f'source = "{paths.source}"\nmountpoint = "{paths.mountpoint}"\ncache_dir = "{paths.cache_dir}"\n')
    assert Options.load(toml=toml).mountpoint == paths.mountpoint


def test_the_options_of_mount8_are_accepted(paths: Paths) -> None:
    words = (
        "ro,defaults,auto,noauto,nofail,_netdev,noatime,nosuid,nodev,nouser,owner,comment=x,x-systemd.automount,exec"
    )
    assert paths.load(words + ",x-systemd.mount-timeout=30,,") == paths.load()


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("noexec", False),
        ("user", False),
        ("users", False),
        ("user=somebody", False),
        ("noexec,exec", True),
        ("user,exec", True),
        ("exec,noexec", False),
        ("exec=off", False),
        ("nouser", True),
    ],
)
def test_noexec_is_an_option(paths: Paths, words: str, runs: bool) -> None:
    assert paths.load(words).exec is runs


@pytest.mark.parametrize("word", ["rw", "suid", "dev", "strictatime", "remount", "mand", "bind", "nosymfollow"])
def test_an_option_of_mount8_that_spiderfs_refuses(paths: Paths, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        paths.load(f"ro,{word}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_comma_in_a_value_is_escaped(paths: Paths, tmp_path: Path) -> None:
    assert paths.load(rf"log_file={tmp_path}/a\,b.log,policy=lru").log_file == tmp_path / "a,b.log"


def test_spaces_around_names_and_values_of_options_have_no_meaning(paths: Paths) -> None:
    options = paths.load(" capacity = 20GB , policy = lru", "ro , noexec ")
    assert (str(options.capacity), options.policy, options.exec) == ("20GB", "lru", False)


@pytest.mark.parametrize("source", ["gcs://b", "server:/export", "user@host:/data"])
def test_a_source_that_is_an_address_is_refused(paths: Paths, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"^the source {source} is an address, .* mount it first") as caught:
        Options.load((), None, source, paths.mountpoint)
    assert len(str(caught.value).splitlines()) == 1
    monkeypatch.chdir(paths.source)
    (paths.source / source).mkdir(parents=True)
    cache_dir = f"cache_dir={paths.cache_dir}"
    assert Options.load([cache_dir], None, f"./{source}", paths.mountpoint).source == paths.source / source


class _Bucket(MemorySource):
    """A source with a URL, which says what a test wants it to say."""

    root_fd = None
    says: Exception | None = None

    def __init__(self, named: str, settings: StoreSettings) -> None:
        super().__init__(tagged=True)
        self.identity = named

    def stat(self, path: bytes) -> SourceStat:
        if self.says:
            raise self.says
        return super().stat(path)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> type[_Bucket]:
    monkeypatch.setitem(OPENERS, "memory", Opener(_Bucket, OPENERS["s3"].settings))
    monkeypatch.setattr(_Bucket, "says", None)
    return _Bucket


def load_url(paths: Paths, *cli: str, url: str = "memory://bucket/train") -> Options:
    return Options.load([f"cache_dir={paths.cache_dir}", *cli], None, url, paths.mountpoint)


def test_a_list_of_names_is_for_sources_without_one(paths: Paths, tmp_path: Path) -> None:
    assert (paths.load().dir_ttl, paths.load("names=none").dir_ttl) == (1.0, 1.0)
    options = paths.load(f"names={tmp_path}/list")
    assert (options.names, options.dir_ttl, options.store_settings.names_by_time) == (tmp_path / "list", 3600.0, True)
    with pytest.raises(ConfigError, match="https:// has a list of its own: leave out names"):
        load_url(paths, f"names={tmp_path}/list", url="https://data.example.org/manifest.tsv")


def test_a_url_is_a_source_with_defaults_of_its_own(paths: Paths, bucket: type[_Bucket]) -> None:
    options = load_url(paths)
    assert options.source == "memory://bucket/train"
    assert options.dir_ttl == 3600.0
    chosen = load_url(paths, "dir_ttl=5s")
    assert chosen.dir_ttl == 5.0
    assert Options.load([f"{row.name}={row.value}" for row in options.as_table()]) == options
    assert options.changed("ttl", "1s").source == options.source
    caches = {Options(source=url, mountpoint=paths.mountpoint).cache_dir for url in ("memory://a", "memory://b")}
    assert len(caches) == 2


def test_a_data_set_of_a_hub_is_immutable_unless_someone_says_otherwise(paths: Paths) -> None:
    def made(**values: object) -> Options:
        return Options(source="hf://datasets/owner/photos", mountpoint=paths.mountpoint, **values)

    assert made().immutable
    assert not made(immutable=False).immutable
    assert not made(binding="pyfuse3").immutable
    assert not Options(source="https://host/manifest", mountpoint=paths.mountpoint).immutable


def test_a_directory_may_have_a_name_like_a_url(
    paths: Paths, bucket: type[_Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(paths.source)
    (paths.source / "memory:/bucket").mkdir(parents=True)
    options = load_url(paths, url="./memory://bucket")
    assert options.source == paths.source / "memory:/bucket"
    assert options.dir_ttl < 3600


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("source.endpoint=minio:9000", "write it like https://"),
        ("source.endpoint=https://", "write it like https://"),
        ("source.endpoint=https://key:word@host", "leave the password out"),
        ("source.endpoint=https://host?token=secret", "write it like https://"),
        ("source.addressing=host", "addressing"),
    ],
)
def test_a_wrong_setting_of_a_store_is_explained(paths: Paths, bucket: type[_Bucket], option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_url(paths, option)


def test_settings_of_a_store_reach_it(paths: Paths, bucket: type[_Bucket]) -> None:
    options = load_url(
        paths,
        "source.endpoint=http://host:1/,source.region=r,source.profile=p,source.anonymous,source.requester_pays",
        "source.addressing=path,source.timeout_s=3",
    )
    assert options.store_settings == StoreSettings("http://host:1", "r", "p", True, True, "path", 3.0)
    assert load_url(paths).store_settings == StoreSettings()
    with pytest.raises(ConfigError, match="the source is a directory: leave it out"):
        paths.load("source.region=r")


def test_nodes_are_named_in_an_option_or_in_a_file(paths: Paths, tmp_path: Path) -> None:
    nodes = {"http://n1:8443": 1.0, "https://n2:8443/imagenet": 2.5}
    options = paths.load("peers=http://n1:8443/+https://n2:8443/imagenet*2.5,peer_self=http://n1:8443")
    assert (options.peers, options.peer_self) == (nodes, "http://n1:8443")
    rows = {row.name: row.value for row in options.as_table()}
    assert rows["peers"] == "http://n1:8443+https://n2:8443/imagenet*2.5"
    assert paths.load(f"peers={rows['peers']},peer_self={rows['peer_self']}") == options
    file = tmp_path / "options.toml"
    file.write_text('peers = ["http://n1:8443", "https://n2:8443/imagenet*2.5"]\n')
    assert Options.load([], file, paths.source, paths.mountpoint).peers == nodes
    assert paths.load("peers=none") == paths.load()
    options = paths.load("peers=http://nodes:8443,peer_self=http://10.0.0.1:8443")
    assert (options.peers, options.peer_self) == ({"http://nodes:8443": 1.0}, "http://10.0.0.1:8443")
    options = paths.load("peers=cluster/imagenet,cluster=redis://n1")
    assert (options.peers, options.peer_self) == ({"cluster/imagenet": 1.0}, "")
    assert options.changed("peers", "http://n1:8443+http://n2:8443").peer_self == ""
    rows = {row.name: row.value for row in options.as_table()}
    assert paths.load(f"peers={rows['peers']},peer_self={rows['peer_self']},cluster=redis://n1") == options
    file.write_text('peers = ["cluster/imagenet"]\npeer_self = "http://n2:1"\ncluster = "redis://n1"\n')
    assert Options.load([], file, paths.source, paths.mountpoint).peer_self == "http://n2:1"
    for text, servers in (
        ("redis://me@n1/set*0.3+rediss://n2:6380/set*0.5", {"redis://me@n1/set": 0.3, "rediss://n2:6380/set": 0.5}),
        ("redis://n1/set+redis://n2/set*0.5", {"redis://n1/set": 0.0, "redis://n2/set": 0.5}),
        ("redis://n1/set*1", {"redis://n1/set": 1.0}),
    ):
        options = paths.load(f"peers={text}")
        assert options.peers == servers
        assert {row.name: row.value for row in options.as_table()}["peers"] == text


@pytest.mark.parametrize("address", ["redis://n1", "redis://n1:6379", "rediss://user@n1:6380", "redis://[::1]:6379"])
def test_a_server_for_several_nodes(paths: Paths, address: str) -> None:
    options = paths.load(f"cluster={address}/")
    assert options.cluster == address
    assert {row.name: row.value for row in options.as_table()}["cluster"] == address
    assert paths.load("cluster=none") == paths.load()


@pytest.mark.parametrize("source", ["memory:/bucket/train", "memory:bucket/", "Memory://bucket"])
def test_a_url_with_too_few_slashes_is_a_mistake(paths: Paths, bucket: type[_Bucket], source: str) -> None:
    with pytest.raises(ConfigError, match="neither a URL nor a path: write memory://bucket"):
        load_url(paths, url=source)


def test_what_a_store_says_reaches_the_user(paths: Paths, bucket: type[_Bucket]) -> None:
    bucket.says = SourceDenied("memory://bucket refuses these credentials: set AWS_PROFILE")
    with pytest.raises(ConfigError, match=r"^memory://bucket refuses these credentials: set AWS_PROFILE$"):
        load_url(paths)
    bucket.says = SourceUnavailable("long " * 10_000)
    with pytest.raises(ConfigError, match=r"^long long"):
        load_url(paths)


def test_no_packages_are_written_to_an_object_store(paths: Paths, bucket: type[_Bucket]) -> None:
    with pytest.raises(ConfigError, match="leave out packages"):
        load_url(paths, "packages=source")


def test_a_value_that_is_shown_is_read_back(paths: Paths) -> None:
    options = paths.load("capacity=20%,uid=7,dir_mode=0500,ttl=inf,source.bandwidth=100MB,trace=/tmp/t,read_ahead=0")
    shown = [f"{row.name}={row.value}" for row in options.as_table()]
    assert Options.load(shown) == options


def test_a_user_without_a_home_is_asked_for_a_path(monkeypatch: pytest.MonkeyPatch, paths: Paths) -> None:
    """As in a container that is given a number without an entry among its users."""
    for ask in ("getuid", "geteuid"):
        monkeypatch.setattr(os, ask, lambda: 1_000_670_000)
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="no home directory: choose a place for the cache, -o cache_dir=DIR"):
        Options(source=paths.source, mountpoint=paths.mountpoint)
    for text in ("cache_dir=~/cache", "log_file=~/log", "cache_dir=~nobody-of-this-name/cache"):
        with pytest.raises(ConfigError, match="write the path without it"):
            paths.load(text)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Options(source=paths.source, mountpoint=paths.mountpoint).cache_dir.first.is_relative_to("/var/cache")


def test_the_default_cache_is_one_per_source(monkeypatch: pytest.MonkeyPatch, paths: Paths, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "link").symlink_to(paths.source)
    first, linked, other = (
        Options(source=source, mountpoint=paths.mountpoint).cache_dir.first
        for source in (paths.source, tmp_path / "link", tmp_path)
    )
    assert first.parent == tmp_path / "xdg" / "spiderfs"
    assert first == linked != other


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("capcity=1GiB", "did you mean capacity?"),
        ("latency_ms=1", "did you mean source.latency_ms?"),
        ("rw", "leave out rw"),
        ("remount", "spiderfs config"),
        ("capacity", "capacity=20GiB"),
        ("workers=99", "for example workers=2"),
        ("policy=lruu", "there is no policy 'lruu' for mounts: choose one of icache"),
        ("memory_limit=much", "'much' is not a size"),
        ("memory_limit=100MiB,workers=1", "the processes and a file in flight in each need 280MiB: write at least"),
        ("memory_limit=300MiB,workers=2", "with workers=2 and sample_max_bytes=8MiB, the processes and a file"),
        ("memory_limit=1GiB,workers=1,sample_max_bytes=1GiB", "sample_max_bytes=1GiB, the processes"),
        ("immutable=maybe", "immutable=maybe: write on or off"),
        ("capacity=-5GiB", "a size is not negative: write it like 20GiB"),
        ("ttl=-5s", "a duration is not negative"),
        ("file_mode=9", "write it like 0444"),
        ("ttl=5y", "write it like 30s"),
        ("substitute=maybe", "for example substitute=off"),
        ("large_share=nan", "for example large_share=0.5"),
        ("log_file=", "write the path"),
        ("source.latency_ms=-2", "for example source.latency_ms=5"),
        ("peers=n1:8443+n2:8443", "write it like https://"),
        ("peers=http://10.0.0.1:8443", "name all nodes, with this one"),
        ("peers=http://nodes:8443,peer_self=http://10.0.0.1:80", "peers does not name this node"),
        ("peers=redis://n1:6379", "write which, as redis://n1:6379/imagenet"),
        ("peers=redis://:secret@n1:6379/a", "leave the password out"),
        ("peers=redis://n1:6379/a+http://n2:8443", "shares of the samples"),
        ("peers=redis://n1:6379/a*0.6+redis://n2:6379/a*0.5", "1 at most in all"),
        ("peers=redis://n1:6379/a*0", "'0' is no weight"),
        ("peers=http://n1:8443+http://n1:8443/", "two have one"),
        ("peers=http://n1:8443+", "a node has no address"),
        ("peers=http://n1:8443+http://me:word@n2:8443", "leave logins out"),
        ("peers=http://n1:8443*0+http://n2:8443", "'0' is no weight of a node"),
        ("peers=http://n1:8443+http://n2:8443,view=jpeg256", "leave out view, or peers"),
        ("peer_self=http://n3:8443", "peers does not name this node"),
        ("peers=cluster,cluster=redis://n1", "write cluster/imagenet"),
        ("peers=cluster/a/b,cluster=redis://n1", "write cluster/imagenet"),
        ("peers=cluster/a+http://n1:8443,cluster=redis://n1", "write cluster/imagenet"),
        ("peers=http://n1:8443+cluster/a,cluster=redis://n1", "not the address of a server"),
        ("peers=cluster/a", "write cluster=redis://n1:6379"),
        ("peer_timeout=0s", "peer_timeout"),
        ("cluster=n1:6379", "write it like redis://n1:6379"),
        ("cluster=redis://", "write it like redis://n1:6379"),
        ("cluster=redis://n1:99999", "write it like redis://n1:6379"),
        ("cluster=redis://n1?db=2", "write it like redis://n1:6379"),
        ("cluster=redis://:word@n1:6379", "leave the password out, set REDISCLI_AUTH"),
        ("forms=50-50", "like 50-30-20"),
        ("forms=a-b-c", "like 50-30-20"),
        ("forms=60-60-0", "add up to 120"),
        ("forms=50-50-0", "choose a view with view=NAME"),
        ("forms=70-0-30,partials_share=0.2", "leave out partials_share, or forms"),
        ("binding=pyfuse3,view=bmp256,forms=50-50-0", "leave out view, or binding=pyfuse3"),
        ("source=/does/not/exist\n,mountpoint=/", "the source"),
    ],
)
def test_a_wrong_option_is_one_line_with_a_remedy(paths: Paths, option: str, remedy: str) -> None:
    places_given = {} if "mountpoint" in option else {"source": paths.source, "mountpoint": paths.mountpoint}
    with pytest.raises(ConfigError) as caught:
        Options.load([option], **places_given)
    assert remedy in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "word@" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers = 99", "workers=99"),
        ("capcity = 1", "did you mean capacity"),
        ("x y", "is not TOML"),
        ("\xff", "TOML"),
    ],
)
def test_a_wrong_file_is_named(paths: Paths, tmp_path: Path, text: str, said: str) -> None:
    toml = tmp_path / "mount.toml"
    toml.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=said) as caught:
        paths.load(toml=toml)
    assert str(caught.value).startswith(str(toml))
    with pytest.raises(ConfigError, match="cannot be read"):
        paths.load(toml=tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("source", "mountpoint", "cache_dir", "said"),
    [
        ("missing", "mnt", "cache", "does not exist"),
        ("file", "mnt", "cache", "not a directory"),
        ("source", "missing", "cache", "mkdir -p"),
        ("source", "file", "cache", "not a directory"),
        ("source", "source/inner", "cache", "inside the source"),
        ("source/inner", "source", "cache", "would hide the source"),
        ("source", "source", "cache", "would hide the source"),
        ("link", "source", "cache", "would hide the source"),
        ("source", "link", "cache", "would hide the source"),
        ("link/inner", "source", "cache", "would hide the source"),
        ("source", "link/inner", "cache", "inside the source"),
        ("source", "mnt", "source/cache", "inside the source"),
        ("source", "mnt", "mnt", "inside the mount point"),
        ("source", "mnt", "file", "not a directory"),
        ("", "mnt", "cache", "path is empty"),
    ],
)
def test_paths_that_cannot_be_used_together(
    paths: Paths, tmp_path: Path, source: str, mountpoint: str, cache_dir: str, said: str
) -> None:
    (tmp_path / "file").touch()
    (paths.source / "inner").mkdir()
    (tmp_path / "link").symlink_to(paths.source)
    with pytest.raises(SpiderfsError, match=said) as caught:
        Options.load(
            [f"cache_dir={tmp_path / cache_dir}"], None, tmp_path / source if source else "", tmp_path / mountpoint
        )
    assert len(str(caught.value).splitlines()) == 1


def test_a_mount_may_lie_over_files(paths: Paths) -> None:
    (paths.mountpoint / "file").touch()
    assert paths.load() == paths.load()


def test_a_path_that_is_not_named(paths: Paths) -> None:
    with pytest.raises(
        ConfigError, match=r"no mountpoint is named: write 'spiderfs mount SOURCE MOUNTPOINT', .*-config"
    ):
        Options.load((), None, paths.source)


def test_a_binding_gets_as_many_workers_as_it_can_serve_with(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert paths.load("binding=kernel").workers == 4
    assert paths.load("binding=pyfuse3").workers == 1
    assert paths.load("binding=pyfuse3,workers=1").workers == 1
    for text in ("binding=pyfuse3,workers=2", "workers=2,binding=pyfuse3"):
        with pytest.raises(ConfigError, match=r"^workers=2: binding=pyfuse3 serves with one worker: leave out workers"):
            paths.load(text)


def test_live_changes(paths: Paths) -> None:
    options = paths.load()
    assert options.changed("capacity", "20%").capacity == Capacity(20, "percent")
    assert options.changed("source.latency_ms", "2.5").slow_settings()["latency_ms"] == 2.5
    assert options.changed("policy", "lru").changed("policy", "spider") == options
    with pytest.raises(ConfigError, match=r"cannot be changed while mounted: .* -o sample_max_bytes=1MiB"):
        options.changed("sample_max_bytes", "1MiB")
    with pytest.raises(ConfigError, match="did you mean ttl"):
        options.changed("tttl", "1s")
    with pytest.raises(ConfigError, match="write it like"):
        check_change("capacity", "none at all")
    check_change("ttl", "5min")
    check_change("peers", "cluster/imagenet")


def test_every_option_is_explained() -> None:
    rows = default_rows()
    assert {row.name for row in rows if row.live} >= {
        "capacity",
        "policy",
        "ttl",
        "source.latency_ms",
        "source.bandwidth",
    }
    assert all(row.help and row.value and "\n" not in row.help for row in rows)
    assert [row.name for row in rows[:5]] == ["cache_dir", "capacity", "immutable", "plan", "allow_other"]
    assert [group for group, _ in itertools.groupby(row.group for row in rows)] == list(GROUPS)


def test_a_view_is_one_of_the_recipes(paths: Paths, tmp_path: Path) -> None:
    assert paths.load().shown_form == "original"
    assert paths.load("view=bmp256").shown_form == "bmp256"
    assert paths.load("views=small:jpeg:192:85,view=small").recipes == {**READY, "small": Recipe("jpeg", 192, 85)}
    toml = tmp_path / "views.toml"
    toml.write_text('view = "small"\n[views.small]\nshort_side = 192\nformat = "bmp"\n')
    options = paths.load(toml=toml)
    assert options.recipes["small"] == Recipe("bmp", 192)
    assert paths.load("binding=pyfuse3").recipes == {}
    assert {row.name: row.value for row in options.as_table()}["views"] == "small:bmp:192"
    for wrong, said in (
        ("view=large", "choose one of jpeg256"),
        ("view=jpeg256,binding=pyfuse3", "leave out view"),
        ("view=jpeg256,packages=source", "leave out view"),
        ("views=small:gif:3", "choose one of jpeg"),
    ):
        with pytest.raises(ConfigError, match=said):
            paths.load(wrong)


def test_a_radius_is_a_number_or_a_calibration(paths: Paths) -> None:
    assert [paths.load(f"radius={given}").radius for given in ("0.50", "class", "nearest")] == [0.5, "class", "nearest"]
    options = paths.load("embeddings=raw,radius=1.420,index=exact,radius_share=0.01")
    assert (options.radius, options.embeddings, options.radius_share) == (1.42, "raw", 0.01)
    assert {row.name: row.value for row in options.as_table()}["radius"] == "1.42"
    for wrong, said in (
        ("radius=wide", "give a number above 0, class or nearest"),
        ("radius=nan", "give a number above 0, class or nearest"),
        ("radius=class,radius_share=1", "less than 1"),
        ("radius=2.1", "give up to 2, or mount with -o embeddings=raw"),
        ("embeddings=raw,index=cells", "choose index=exact or hnsw"),
    ):
        with pytest.raises(ConfigError, match=said):
            paths.load(wrong)


def test_a_split_among_forms_is_written_in_percent(paths: Paths) -> None:
    assert paths.load().forms == "none"
    assert paths.load("forms=auto").forms == "auto"
    assert paths.load("forms=70-0-30").forms == "70-0-30"
    assert paths.load("view=bmp256,forms=050-050-0").forms == "50-50-0"
    changed = paths.load("forms=70-0-30").changed("policy", "lru")
    assert (changed.forms, changed.policy) == ("70-0-30", "lru")
