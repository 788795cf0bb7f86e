"""Real mounts of a directory that is shown by a list of names, where the list is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mounting import mounted, settle

MIB = 1 << 20


def test_a_large_file_whose_line_is_wrong_is_read_as_it_is_now(tmp_path: Path) -> None:
    source, names = tmp_path / "source", tmp_path / "names"
    source.mkdir()
    contents = {name: os.urandom(3 * MIB) for name in ("right", "time", "longer", "shorter", "small")}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    settle(source)
    with names.open("w") as lines:
        for name, size, late_s in (
            ("right", 3 * MIB, 0),
            ("time", 3 * MIB, 100),
            ("longer", 2 * MIB, 0),
            ("shorter", 4 * MIB, 0),
            ("small", 3000, 0),
        ):
            found = (source / name).stat()
            lines.write(f"{name}\t{size}\t{found.st_mtime_ns // 10**9 - late_s}.{found.st_mtime_ns % 10**9:09}\n")
    with mounted(source, tmp_path / "mounted", workers=2, names=names, sample_max_bytes="1MiB") as mount:
        mount.expect("the list of names is out of date", "has changed at the source")
        # Its open finds out: it is no sample.
        assert (mount.point / "small").read_bytes() == contents["small"]
        assert (mount.point / "right").read_bytes() == contents["right"]
        for name in ("time", "longer", "shorter"):
            with pytest.raises(OSError, match="Stale file handle"):
                (mount.point / name).read_bytes()
            for _ in range(3):
                assert (mount.point / name).read_bytes() == contents[name]
        for name in contents:
            shown, there = (mount.point / name).stat(), (source / name).stat()
            assert (shown.st_size, shown.st_mtime_ns, shown.st_mode & 0o777) == (
                there.st_size,
                there.st_mtime_ns,
                0o400,
            )
        assert len(mount.logged("the list of names is out of date")) == 1
