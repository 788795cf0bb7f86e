"""A file that lies in memory as a whole, as `open(path, "rb")` would give it."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterable
from typing import Any, NoReturn


class CachedFile(io.BytesIO):
    """The bytes of one version of a file, read-only; `io.BytesIO` does not copy what it is given to begin with."""

    mode = "rb"

    def __init__(self, content: bytes, name: Any) -> None:
        super().__init__(content)
        self.name = name
        self._content = content
        self._file: io.FileIO | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position; a place before the beginning is an error, but io.BytesIO would go to the beginning."""
        start = {os.SEEK_CUR: self.tell(), os.SEEK_END: len(self._content)}.get(whence, 0)
        if start + offset < 0 and not self.closed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().seek(offset, whence)

    def peek(self, size: int = 0, /) -> bytes:
        """The bytes from the present position on, without moving it."""
        return self._content[self.tell() :]

    def fileno(self) -> int:
        """A descriptor of the same bytes, opened through the mount; its position is its own.

        Raises io.UnsupportedOperation where the name means other bytes by now.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._file is None:
            file = io.FileIO(self.name)
            if os.fstat(file.fileno()).st_size != len(self._content) or file.readall() != self._content:
                file.close()
                raise io.UnsupportedOperation("fileno")
            self._file = file
        os.lseek(self._file.fileno(), self.tell(), os.SEEK_SET)
        return self._file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def writable(self) -> bool:
        return False

    def write(self, _: Any, /) -> NoReturn:
        raise io.UnsupportedOperation("write")

    def writelines(self, _: Iterable[Any], /) -> NoReturn:
        raise io.UnsupportedOperation("write")

    def truncate(self, _: int | None = None, /) -> NoReturn:
        raise io.UnsupportedOperation("truncate")

    def getbuffer(self) -> memoryview:
        return super().getbuffer().toreadonly()
