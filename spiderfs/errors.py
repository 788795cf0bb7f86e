"""All errors; each class has the errno that a caller of the file system gets, its own or that of the class above.

StoreCorrupt alone is no SpiderfsError. It is for no one on the way, like SystemExit: it ends the process that meets it.

Each message is one line; it says what the user can do, if the user can do anything.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class SpiderfsError(Exception):
    """The base class of all errors that spiderfs raises on purpose."""

    errno: ClassVar[int] = errno.EIO


class UsageError(SpiderfsError):
    """The user asked for something impossible; the message says what to do."""

    errno = errno.EINVAL


class ConfigError(UsageError):
    """An option, a TOML key or a control-file write is wrong."""


class SourceAway(ConfigError):
    """The source does not answer, so that no one can say whether it is the right one."""


class MountError(UsageError):
    """The mount point or the cache directory cannot be used."""

    errno = errno.EBUSY


class SourceError(SpiderfsError):
    """The source does not give what was asked for."""


class SourceNotFound(SourceError):
    """The source answered that the name does not exist."""

    errno = errno.ENOENT


class SourceNotADirectory(SourceNotFound):
    """What was taken for a directory on the way to it is none."""

    errno = errno.ENOTDIR


class SourceDenied(SourceError):
    """The source refuses this user."""

    errno = errno.EACCES


class SourceChanged(SourceError):
    """The file is no longer the version that was asked for."""

    errno = errno.ESTALE


class ViewFailed(SourceError):
    """A view of the file exists, and cannot be made now."""


class ArchiveFailed(SourceError):
    """An archive, or one of its members, cannot be shown."""


class ArchiveDamaged(ArchiveFailed):
    """Nothing of the archive is shown, and the log has said why."""


class SourceUnavailable(SourceError):
    """The source did not answer; the call is repeated, the file is not taken for gone."""


class SourceTimeout(SourceUnavailable):
    """The source did not answer in time."""

    errno = errno.ETIMEDOUT


class SourceEntryFailed(SourceUnavailable):
    """The source is there, and fails for this name: a dead mount, a bad block."""


class SourceUnreachable(SourceUnavailable):
    """No connection to it can be made."""


class SourceThrottled(SourceUnavailable):
    """The source says that it is asked for too much at a time; the call is repeated."""


class SourceNotReady(SourceThrottled):
    """The source is there, and what is asked for has to be made or awaited first."""


class StoreError(SpiderfsError):
    """No reader gets one: the mount reads from the source instead."""


class StoreFull(StoreError):
    """The disk, or LMDB's map, is full."""

    errno = errno.ENOSPC


class StoreDamaged(StoreError):
    """A record is not what was written; its file must be fetched again."""


class StoreCorrupt(BaseException):
    """The store must be rebuilt, so this process must not go on with it.

    No handler of ordinary errors catches this one. A worker or the manager ends of it; then the supervisor wipes the
    store and starts both again, and the kernel hands out the unanswered requests once more, so no reader sees an error.
    Only a reader's own process, which must not end, catches it (`spiderfs.client`).
    """


class HookError(SpiderfsError):
    """A trainer sent something that cannot be used; no reader gets one."""


class ProtocolError(HookError):
    """A message of the hook protocol is malformed.

    `code` names the error for programs; after a `fatal` error the rest of the stream cannot be understood.
    """

    errno = errno.EPROTO

    def __init__(self, text: str, code: str = "malformed", *, fatal: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.fatal = fatal


class StreamLost(SpiderfsError):
    """The server by which several nodes share scores has not done what it was asked; no reader gets one.

    The message says why, in a few words.
    """


class FileSystemError(SpiderfsError):
    """The mount itself answers with an error."""


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
    """The texts of open control files have no room, or take more than 2 GiB."""

    errno = errno.ENOSPC


class Stale(FileSystemError):
    errno = errno.ESTALE


class TooManyLinks(FileSystemError):
    """A path passes 40 symbolic links; in a mount the kernel counts them."""

    errno = errno.ELOOP


class DeadlyRequest(FileSystemError):
    """Worker after worker has died at this request."""


class TryAgain(FileSystemError):
    """The manager is being started again, or too many control files are open."""

    errno = errno.EAGAIN


class Busy(TryAgain):
    """As TryAgain, from read(2), whose EAGAIN many programs take for "nothing yet"; or too many requests wait."""

    errno = errno.EBUSY
