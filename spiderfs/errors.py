"""The tree of all errors; each class has the errno that a caller of the file system gets.

    SpiderfsError (EIO)
    ├── UsageError (EINVAL)            the user asked for something impossible; the message says what to do
    │   ├── ConfigError (EINVAL)       an option, a TOML key or a control-file write is wrong
    │   │   └── SourceAway (EINVAL)    the source does not answer, so that no one can say whether it is the right one
    │   └── MountError (EBUSY)         the mount point or the cache directory cannot be used
    ├── SourceError (EIO)
    │   ├── SourceNotFound (ENOENT)    the source answered that the name does not exist
    │   │   └── SourceNotADirectory (ENOTDIR)  what was taken for a directory on the way to it is none
    │   ├── SourceDenied (EACCES)      the source refuses this user
    │   ├── SourceChanged (ESTALE)     the file is no longer the version that was asked for
    │   ├── ViewFailed (EIO)           a view of the file exists, and cannot be made now
    │   ├── ArchiveFailed (EIO)        an archive, or one of its members, cannot be shown
    │   │   └── ArchiveDamaged (EIO)   nothing of the archive is shown, and the log has said why
    │   └── SourceUnavailable (EIO)    the source did not answer; the call is repeated, the file is not taken for gone
    │       ├── SourceTimeout (ETIMEDOUT)
    │       ├── SourceEntryFailed (EIO)  the source is there, and fails for this name: a dead mount, a bad block
    │       ├── SourceUnreachable (EIO)  no connection to it can be made
    │       └── SourceThrottled (EIO)  the source says that it is asked for too much at a time; the call is repeated
    │           └── SourceNotReady (EIO)  the source is there, and what is asked for has to be made or awaited first
    ├── StoreError (EIO)               no reader gets one: the mount reads from the source instead
    │   ├── StoreFull (ENOSPC)         the disk, or LMDB's map, is full
    │   └── StoreDamaged (EIO)         a record is not what was written; its file must be fetched again
    ├── HookError (EIO)                a trainer sent something that cannot be used; no reader gets one
    │   └── ProtocolError (EPROTO)     a message of the hook protocol is malformed
    ├── StreamLost (EIO)               the server by which several nodes share scores fails; no reader gets one
    └── FileSystemError (EIO)          the mount itself answers with an error
        ├── NotFound (ENOENT)
        ├── NameTooLong (ENAMETOOLONG)
        ├── NotADirectory (ENOTDIR)
        ├── IsADirectory (EISDIR)
        ├── InvalidArgument (EINVAL)
        ├── AccessDenied (EACCES)
        ├── NoAttribute (ENODATA)
        ├── AttributeTooLong (ERANGE)
        ├── ReadOnly (EROFS)
        ├── NoRoom (ENOSPC)            the texts of open control files have no room, or take more than 2 GiB
        ├── Stale (ESTALE)
        ├── TooManyLinks (ELOOP)       a path passes 40 symbolic links; in a mount the kernel counts them
        ├── DeadlyRequest (EIO)        worker after worker has died at this request
        └── TryAgain (EAGAIN)          the manager is being started again, or too many control files are open
            └── Busy (EBUSY)           the same from read(2), whose EAGAIN many programs take for "nothing yet"; or too
                                       many requests wait for the source already

StoreCorrupt is not in this tree. It is for no one on the way, like SystemExit: it ends the process that meets it.

Each message is one line; it says what the user can do, if the user can do anything.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class SpiderfsError(Exception):
    """The base class of all errors that spiderfs raises on purpose."""

    errno: ClassVar[int] = errno.EIO


class UsageError(SpiderfsError):
    errno = errno.EINVAL


class ConfigError(UsageError):
    errno = errno.EINVAL


class SourceAway(ConfigError):
    errno = errno.EINVAL


class MountError(UsageError):
    errno = errno.EBUSY


class SourceError(SpiderfsError):
    errno = errno.EIO


class SourceNotFound(SourceError):
    errno = errno.ENOENT


class SourceNotADirectory(SourceNotFound):
    errno = errno.ENOTDIR


class SourceDenied(SourceError):
    errno = errno.EACCES


class SourceChanged(SourceError):
    errno = errno.ESTALE


class ViewFailed(SourceError):
    errno = errno.EIO


class ArchiveFailed(SourceError):
    errno = errno.EIO


class ArchiveDamaged(ArchiveFailed):
    errno = errno.EIO


class SourceUnavailable(SourceError):
    errno = errno.EIO


class SourceTimeout(SourceUnavailable):
    errno = errno.ETIMEDOUT


class SourceEntryFailed(SourceUnavailable):
    errno = errno.EIO


class SourceUnreachable(SourceUnavailable):
    errno = errno.EIO


class SourceThrottled(SourceUnavailable):
    errno = errno.EIO


class SourceNotReady(SourceThrottled):
    errno = errno.EIO


class StoreError(SpiderfsError):
    errno = errno.EIO


class StoreFull(StoreError):
    errno = errno.ENOSPC


class StoreDamaged(StoreError):
    errno = errno.EIO


class StoreCorrupt(BaseException):
    """The store must be rebuilt, so this process must not go on with it.

    No handler of ordinary errors catches this one. A worker or the manager ends of it (`daemon/deaths.py`); then the
    supervisor wipes the store and starts both again, and the kernel hands out the unanswered requests once more, so no
    reader sees an error. Only a reader's own process, which must not end, catches it (`spiderfs.client`).
    """


class HookError(SpiderfsError):
    errno = errno.EIO


class ProtocolError(HookError):
    """`code` names the error for programs; after a `fatal` error the rest of the stream cannot be understood."""

    errno = errno.EPROTO

    def __init__(self, text: str, code: str = "malformed", *, fatal: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.fatal = fatal


class StreamLost(SpiderfsError):
    """The server has not done what it was asked; the message says why, in a few words."""


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
    """The attribute is too long for the caller's buffer."""

    errno = errno.ERANGE


class ReadOnly(FileSystemError):
    errno = errno.EROFS


class NoRoom(FileSystemError):
    errno = errno.ENOSPC


class Stale(FileSystemError):
    errno = errno.ESTALE


class TooManyLinks(FileSystemError):
    errno = errno.ELOOP


class DeadlyRequest(FileSystemError):
    errno = errno.EIO


class TryAgain(FileSystemError):
    errno = errno.EAGAIN


class Busy(TryAgain):
    errno = errno.EBUSY
