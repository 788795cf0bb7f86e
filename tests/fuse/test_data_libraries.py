"""The libraries that data sets are read with, as users do, through the files that `spiderfs.client` gives to fsspec.

What each library reads is compared with what it reads at the source, and the cache must have answered without FUSE.
"""

from __future__ import annotations

import gc
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import webdataset
from mounting import Mounted, eventually, mounted
from PIL import Image

ROWS, SHARDS = 2000, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    (source / "parts").mkdir()
    rng = Random(1)
    for shard in range(SHARDS):
        table = pyarrow.table(
            {
                "number": range(shard * ROWS, (shard + 1) * ROWS),
                "text": [f"row {number}" for number in range(ROWS)],
                "bytes": [rng.randbytes(100) for _ in range(ROWS)],
            }
        )
        pyarrow.parquet.write_table(table, source / f"parts/part-{shard}.parquet", row_group_size=500)
        with tarfile.open(source / f"shard-{shard}.tar", "w") as tar:
            for number in range(20):
                for suffix, content in (("cls", b"%d" % (number % 5)), ("bin", rng.randbytes(3000))):
                    member = tarfile.TarInfo(f"{shard}{number:03}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    table.drop_columns("bytes").to_pandas().to_csv(source / "table.csv", index=False)
    for label in ("cat", "dog"):
        for number in range(4):
            path = source / "images/train" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 5, 7)).save(path)
    return source


@pytest.fixture(scope="module")
def mount(source: Path, tmp_path_factory: pytest.TempPathFactory, binding: str) -> Iterator[Mounted]:
    with mounted(source, tmp_path_factory.mktemp("m")) as found:
        # What is in the cache is read without FUSE.
        for directory, _, names in os.walk(found.point):
            for name in names:
                if ".spiderfs" not in directory:
                    Path(directory, name).read_bytes()
        yield found


def compared(mount: Mounted, source: Path, read: Callable[[str], Any], opens: int) -> Any:
    """What `read` gives for a place at the mount; it is the same at the source, and so many opens went around FUSE."""
    before = mount.metric("client_opens")
    found = read(f"spiderfs://{mount.point}")
    eventually(lambda: mount.metric("client_opens") >= before + opens, what=f"{opens} opens around FUSE")
    assert found == read(str(source))
    return found


def test_pandas(mount: Mounted, source: Path) -> None:
    def rows(place: str, **how: Any) -> list[list[Any]]:
        tables = [pandas.read_parquet(f"{place}/parts/part-1.parquet", **how), pandas.read_csv(f"{place}/table.csv")]
        return [list(table.itertuples(index=False, name=None)) for table in tables]

    parquet, csv = compared(mount, source, rows, opens=2)
    assert (len(parquet), len(csv)) == (ROWS, ROWS)


def test_pyarrow(mount: Mounted, source: Path) -> None:
    def tables(place: str) -> list[Any]:
        files, path = fsspec.core.url_to_fs(place)
        parts = pyarrow.dataset.dataset(f"{path}/parts", filesystem=files)
        some = parts.to_table(columns=["number"], filter=pyarrow.dataset.field("number") >= 1000)
        one = pyarrow.parquet.read_table(f"{path}/parts/part-0.parquet", filesystem=files, columns=["text"])
        with files.open(f"{path}/parts/part-2.parquet") as file:
            group = pyarrow.parquet.ParquetFile(file).read_row_group(3)
        return [some.to_pydict(), one.to_pydict(), group.to_pydict()]

    numbers, texts, group = compared(mount, source, tables, opens=SHARDS + 2)
    assert numbers["number"] == list(range(1000, SHARDS * ROWS))
    assert (len(texts["text"]), len(group["bytes"])) == (ROWS, 500)


# It leaves files of the source open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset(mount: Mounted, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # webdataset opens URLs by a table of its own.
    monkeypatch.setitem(webdataset.gopen_schemes, "spiderfs", lambda url, *_, **__: fsspec.open(url).open())

    def samples(place: str) -> list[tuple[Any, ...]]:
        shards = f"{place}/shard-{{0..{SHARDS - 1}}}.tar"
        pipeline = webdataset.WebDataset(shards, shardshuffle=False).to_tuple("__key__", "cls", "bin")
        return list(pipeline)

    assert len(compared(mount, source, samples, opens=SHARDS)) == SHARDS * 20
    gc.collect()


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, without the user's cache."""
    import datasets

    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / name))
    return datasets


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_datasets(mount: Mounted, source: Path, tmp_path: Path, datasets: Any, streaming: bool) -> None:
    def rows(place: str) -> list[Any]:
        kind = "mount" if "spiderfs" in place else "source"
        loaded = datasets.load_dataset(
            "parquet",
            data_files={"train": f"{place}/parts/part-*.parquet"},
            split="train",
            streaming=streaming,
            cache_dir=str(tmp_path / kind),
        )
        return [tuple(row.values()) for row in loaded]

    assert len(compared(mount, source, rows, opens=SHARDS)) == SHARDS * ROWS


def test_a_folder_of_images_for_hugging_face_datasets(mount: Mounted, source: Path, datasets: Any) -> None:
    def images(place: str) -> list[Any]:
        # data_files may be a URL; data_dir is taken for a path.
        files = {"train": f"{place}/images/train/**"}
        loaded = datasets.load_dataset("imagefolder", data_files=files, split="train", streaming=True)
        return sorted((row["image"].getpixel((0, 0)), row["label"]) for row in loaded)

    assert len(compared(mount, source, images, opens=8)) == 8
