"""The one tree of errors, each with the errno a file-system caller sees.

    SpiderfsError (EIO)
    ├── UsageError (EINVAL)            the user asked for something impossible; one line, says what to do
    │   ├── ConfigError (EINVAL)       an option, a TOML key or a control-file write is wrong
    │   └── MountError (EBUSY)         the mount point or the cache directory cannot be used
    ├── SourceError (EIO)
    │   ├── SourceNotFound (ENOENT)    the source says positively that the name does not exist
    │   ├── SourceDenied (EACCES)      the source refuses this user
    │   ├── SourceNotADirectory (ENOTDIR)
    │   ├── SourceChanged (ESTALE)     the file is no longer the version that was asked for
    │   └── SourceUnavailable (EIO)    transient: retried, never taken for "gone"
    │       └── SourceTimeout (ETIMEDOUT)
    ├── StoreError (EIO)               never a reader's error: reads fall back to the source
    │   ├── StoreFull (ENOSPC)         the disk, or LMDB's map, is full
    │   ├── StoreDamaged (EIO)         one record is not what was written; it has to be fetched again
    │   └── StoreCorrupt (EIO)         the store must be rebuilt
    ├── HookError (EIO)                what a trainer asked for or sent cannot be used; never a reader's error
    │   └── ProtocolError (EPROTO)     a message of the hook protocol is malformed
    └── FileSystemError (EIO)          what the virtual file system itself answers
        ├── NotFound (ENOENT)
        ├── NameTooLong (ENAMETOOLONG)
        ├── NotADirectory (ENOTDIR)
        ├── IsADirectory (EISDIR)
        ├── InvalidArgument (EINVAL)
        ├── AccessDenied (EACCES)
        ├── NoAttribute (ENODATA)
        ├── AttributeTooLong (ERANGE)
        ├── ReadOnly (EROFS)
        ├── NoRoom (ENOSPC)            the disk of the cache has no room for the snapshot of a long list
        ├── Stale (ESTALE)
        └── TryAgain (EAGAIN)          the manager is restarting; a control file cannot be served now

A message is one line and says what to do about it where anything can be done.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class SpiderfsError(Exception):
    """Base of every error that spiderfs raises on purpose."""

    errno: ClassVar[int] = errno.EIO


class UsageError(SpiderfsError):
    errno = errno.EINVAL


class ConfigError(UsageError):
    errno = errno.EINVAL


class MountError(UsageError):
    errno = errno.EBUSY


class SourceError(SpiderfsError):
    errno = errno.EIO


class SourceNotFound(SourceError):
    errno = errno.ENOENT


class SourceDenied(SourceError):
    errno = errno.EACCES


class SourceNotADirectory(SourceError):
    errno = errno.ENOTDIR


class SourceChanged(SourceError):
    errno = errno.ESTALE


class SourceUnavailable(SourceError):
    errno = errno.EIO


class SourceTimeout(SourceUnavailable):
    errno = errno.ETIMEDOUT


class StoreError(SpiderfsError):
    errno = errno.EIO


class StoreFull(StoreError):
    errno = errno.ENOSPC


class StoreDamaged(StoreError):
    errno = errno.EIO


class StoreCorrupt(StoreError):
    errno = errno.EIO


class HookError(SpiderfsError):
    errno = errno.EIO


class ProtocolError(HookError):
    """`code` is for programs; after a `fatal` one nothing more can be understood of the same stream."""

    errno = errno.EPROTO

    def __init__(self, text: str, code: str = "malformed", *, fatal: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.fatal = fatal


class FileSystemError(SpiderfsError):
    errno = errno.EIO


class NotFound(FileSystemError):
    errno = errno.ENOENT


class NameTooLong(FileSystemError):
    errno = errno.ENAMETOOLONG


class NotADirectory(FileSystemError):
    errno = errno.ENOTDIR


class IsADirectory(FileSystemError):
    errno = errno.EISDIR


class InvalidArgument(FileSystemError):
    errno = errno.EINVAL


class AccessDenied(FileSystemError):
    errno = errno.EACCES


class NoAttribute(FileSystemError):
    errno = errno.ENODATA


class AttributeTooLong(FileSystemError):
    """For the buffer of who asks."""

    errno = errno.ERANGE


class ReadOnly(FileSystemError):
    errno = errno.EROFS


class NoRoom(FileSystemError):
    errno = errno.ENOSPC


class Stale(FileSystemError):
    errno = errno.ESTALE


class TryAgain(FileSystemError):
    errno = errno.EAGAIN
