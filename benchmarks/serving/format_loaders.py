"""The loaders that `benchmarks.serving.streaming_formats` measures, each in a process of its own.

    python -m benchmarks.serving.format_loaders convert FORMAT PHOTOS INTO    writes the photos in a format, as shards
    python -m benchmarks.serving.format_loaders read TASK                     reads two epochs; TASK is JSON

Either prints a line of JSON. All loaders have two workers (SPDL's 32 threads), batches of 64 and a new order in each
epoch, and get the bytes of a JPEG, which `decoded` makes into pixels. A format reads a slow source by its own support
for remote stores: a downloader of MosaicML's and of LitData's, a scheme of WebDataset's. These ask the `SlowSource`
from which plain loaders and mounts read too, in the loader's own processes, so the delay takes no processor time from
anybody; each whole shard is one request. LitData's is registered as s3://, because LitData takes short cuts for
whatever it trusts to be local.

Streaming formats have environments of their own (benchmarks/install-peers), where much of spiderfs cannot be imported:
this module needs PyTorch, Pillow, NumPy and msgpack alone.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.augmentation import as_bytes, crop_of, mirrored
from benchmarks.common.walking import index
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource

CROP, BATCH, LOADER_WORKERS, EPOCHS = 224, 64, 2, 2
# The formats' own default is 64 MB, of which 1,000 photos fill two; a data set worth streaming has thousands.
SHARD_BYTES = 4_000_000
# More than any shard: a source is asked for a whole file of at most so many bytes.
MOST_BYTES = 1 << 40
# WebDataset shuffles the order of its shards, and then within a buffer of so many samples.
SHUFFLE_BUFFER = 1000
# Many more than cores, as where threads mostly wait for the source.
SPDL_THREADS = 32


@dataclass(frozen=True)
class Task:
    loader: str
    """One of LOADERS."""
    data: str
    """The directory of the photos (in a mount, or at the source) or of the shards."""
    cache: str
    """An empty directory for the format's own cache."""
    faults: str | None = None
    """The settings of the slow source by which `data` is read; None to read it as it lies there."""
    most_bytes: int | None = None
    """Of the format's own cache."""
    planned: bool = False
    pool: float | None = None
    """The share of the samples in the pool of a PoolSampler, which draws in the place of a uniform shuffle."""
    decodes: bool = True
    batch: int = BATCH
    drops_pages: bool = False
    """Whether the kernel has to forget a photo that was read, as where the data set is larger than memory."""


@dataclass(frozen=True)
class Times:
    """Seconds of the monotonic clock."""

    imported_s: float
    ready_s: float
    """When the loader knew its samples."""
    ends_s: list[float]
    """Of the epochs."""
    images: list[int]


def decoded(content: bytes) -> Tensor:
    with Image.open(io.BytesIO(content)) as file:
        image = file.convert("RGB")
    cropped = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=crop_of(*image.size))
    return as_bytes(mirrored(cropped))


class Photos(Dataset[Tensor]):
    """Plain files, listed as torchvision's ImageFolder lists them, or whatever else names its samples so."""

    def __init__(self, samples: list[tuple[str, str]], read: Callable[[str], bytes], decodes: bool = True) -> None:
        labels = {label: number for number, label in enumerate(sorted({label for _, label in samples}))}
        self.samples = [(path, labels[label]) for path, label in samples]
        self._read, self._decodes = read, decodes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        content = self._read(self.samples[index][0])
        return decoded(content) if self._decodes else torch.tensor(len(content))


class Remote:
    """A directory behind a slow source."""

    def __init__(self, root: str, faults: str) -> None:
        self._source = SlowSource(LocalSource(root), SlowSettings.open(faults))

    def index(self) -> list[tuple[str, str]]:
        """The same as `walking.index`, of a source whose folders hold files alone."""
        folders = sorted(name for name, _ in self._source.scan(b"") if name != b".")
        return [
            (os.fsdecode(folder + b"/" + name), os.fsdecode(folder))
            for folder in folders
            for name in sorted(name for name, _ in self._source.scan(folder) if name != b".")
        ]

    def read(self, name: str) -> bytes:
        return self._source.read_present(os.fsencode(name), MOST_BYTES)[1]

    def download(self, name: str, to: str) -> None:
        temporary = f"{to}.{os.getpid()}"
        Path(temporary).write_bytes(self.read(name))
        os.replace(temporary, to)


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def read_once(path: str) -> bytes:
    with open(path, "rb") as file:
        content = file.read()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return content


def photos_of(task: Task) -> Photos:
    if task.faults is None:
        return Photos(index(Path(task.data)), read_once if task.drops_pages else read_file, task.decodes)
    remote = Remote(task.data, task.faults)
    return Photos(remote.index(), remote.read)


def files(task: Task) -> Iterable[Any]:
    photos = photos_of(task)
    # With a generator of its own the loader's next epoch can be planned early.
    loader = DataLoader(photos, shuffle=True, generator=torch.Generator(), **_options(task))
    if task.pool is not None:
        from trainer_hook import PoolSampler

        loader = DataLoader(photos, sampler=PoolSampler(len(photos), pool=task.pool), **_options(task))
    if task.planned:
        import trainer_hook

        trainer_hook.plan(task.data, loader)
    return loader


def mosaicml(task: Task) -> Iterable[Any]:
    import streaming
    from streaming.base.storage import download

    class Photos(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Tensor:
            return decoded(super().__getitem__(at)["jpg"])

    options = {"local": task.data}
    if task.faults is not None:
        source, prefix = Remote(task.data, task.faults), "slow://photos/"

        class Downloader(download.CloudDownloader):  # type: ignore[misc]
            @staticmethod
            def _client_identifier() -> str:
                return "slow"

            def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
                source.download(remote.removeprefix(prefix), local)

            def clean_up(self) -> None:
                pass

        download.DOWNLOADER_MAPPINGS["slow"] = Downloader
        options = {"remote": prefix, "local": task.cache}
    photos = Photos(shuffle=True, batch_size=BATCH, cache_limit=task.most_bytes, **options)
    return DataLoader(photos, **_options(task))


def litdata(task: Task) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    options: dict[str, Any] = {"input_dir": task.data}
    if task.faults is not None:
        source, prefix = Remote(task.data, task.faults), "s3://photos"

        class Downloader(downloader.Downloader):  # type: ignore[misc]
            def download_file(self, remote: str, local: str) -> None:
                if not os.path.exists(local):
                    source.download(remote.removeprefix(f"{prefix}/"), local)

        downloader.register_downloader("s3://", Downloader, overwrite=True)
        options = {"input_dir": prefix, "cache_dir": task.cache, "max_cache_size": task.most_bytes}
    photos = StreamingDataset(shuffle=True, transform=lambda sample: decoded(sample["jpg"]), **options)
    return StreamingDataLoader(photos, **_options(task))  # type: ignore[no-any-return]


def webdataset(task: Task) -> Iterable[Any]:
    from webdataset import WebDataset
    from webdataset.cache import FileCache
    from webdataset.gopen import gopen_schemes

    # It looks only every 30 s how large its cache is, by itself: an epoch here is shorter, and would find all in it.
    FileCache.__init__.__kwdefaults__["cache_cleanup_interval"] = 0
    urls = sorted(str(path) for path in Path(task.data).glob("*.tar"))
    options: dict[str, Any] = {}
    if task.faults is not None:
        source, prefix = Remote(task.data, task.faults), "slow:"
        gopen_schemes["slow"] = lambda url, *_, **__: io.BytesIO(source.read(url.removeprefix(prefix)))
        urls = [prefix + os.path.basename(url) for url in urls]
        options = {"cache_dir": task.cache, "cache_size": task.most_bytes or -1}
    photos = WebDataset(urls, shardshuffle=len(urls), **options).shuffle(SHUFFLE_BUFFER)
    return DataLoader(photos.map(lambda sample: decoded(sample["jpg"])), **_options(task))


class Threads:
    """SPDL's loader over plain files: threads of one process, which read and decode a file each."""

    def __init__(self, task: Task) -> None:
        self._photos, self._batch = photos_of(task), task.batch

    def __iter__(self) -> Iterator[Tensor]:
        from spdl.dataloader import DataLoader as ThreadedLoader

        order = torch.randperm(len(self._photos)).tolist()
        return iter(
            ThreadedLoader(
                order,
                preprocessor=self._photos.__getitem__,
                aggregator=torch.stack,
                batch_size=self._batch,
                num_threads=SPDL_THREADS,
            )
        )


def _options(task: Task) -> dict[str, Any]:
    return {"batch_size": task.batch, "num_workers": LOADER_WORKERS, "persistent_workers": True}


LOADERS: dict[str, Callable[[Task], Iterable[Any]]] = {
    "files": files,
    "spdl": Threads,
    "mosaicml": mosaicml,
    "litdata": litdata,
    "webdataset": webdataset,
}


def _write_mosaicml(photos: list[str], into: str) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=into, columns={"jpg": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for path in photos:
            writer.write({"jpg": read_file(path)})


def _write_litdata(photos: list[str], into: str) -> None:
    from litdata import optimize

    optimize(_litdata_sample, photos, into, chunk_bytes=SHARD_BYTES, num_workers=1, verbose=False)


def _litdata_sample(path: str) -> dict[str, bytes]:
    return {"jpg": read_file(path)}


def _write_webdataset(photos: list[str], into: str) -> None:
    from webdataset import ShardWriter

    Path(into).mkdir()
    with ShardWriter(f"{into}/%06d.tar", maxsize=SHARD_BYTES, verbose=0) as writer:
        for number, path in enumerate(photos):
            writer.write({"__key__": f"{number:06d}", "jpg": read_file(path)})


@dataclass(frozen=True)
class Format:
    package: str
    """As the registry of packages names it."""
    module: str
    write: Callable[[list[str], str], None]


FORMATS = {
    "mosaicml": Format("mosaicml-streaming", "streaming", _write_mosaicml),
    "litdata": Format("litdata", "litdata", _write_litdata),
    "webdataset": Format("webdataset", "webdataset", _write_webdataset),
}


def convert(name: str, photos: str, into: str) -> dict[str, Any]:
    """Write all photos below a directory in a format; returns the package's version, and the seconds it took."""
    paths = [path for path, _ in index(Path(photos))]
    importlib.import_module(FORMATS[name].module)
    begin = time.monotonic()
    FORMATS[name].write(paths, into)
    return {"version": version(FORMATS[name].package), "seconds": time.monotonic() - begin}


def read(task: Task) -> Times:
    if task.loader in FORMATS:
        importlib.import_module(FORMATS[task.loader].module)
    elif task.planned:
        importlib.import_module("trainer_hook.planning")
    imported_s = time.monotonic()
    loader = LOADERS[task.loader](task)
    ready_s = time.monotonic()
    ends_s, images = [], []
    for _ in range(EPOCHS):
        images.append(sum(len(batch) for batch in loader))
        ends_s.append(time.monotonic())
    return Times(imported_s, ready_s, ends_s, images)


def main(arguments: list[str]) -> None:
    # As in every benchmark of loaders: a worker decodes on one core.
    torch.set_num_threads(1)
    what, *words = arguments
    found = convert(*words) if what == "convert" else asdict(read(Task(**json.loads(words[0]))))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
