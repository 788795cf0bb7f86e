"""The directories that are no names of the source: `.spiderfs`, with the control files, and in it `views`.

In `views` there is a directory for each form of the files (`views/tree.py`). What lies below one of these are names of
the source, like those below the root, and no affair of this module.
"""

from __future__ import annotations

from collections.abc import Callable

from spiderfs.sources.source import SourceStat
from spiderfs.vfs.answer_types import Attributes, Entry
from spiderfs.vfs.catalogue import ROOT_INODE, VIEWS_INODE, Catalogue, Dentry
from spiderfs.vfs.control_files import CONTROL_DIRECTORY, CONTROL_INODE, Control, ControlAttributes
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.rules import FOREVER_S
from spiderfs.views.tree import VIEWS_DIRECTORY

_VIEWS = VIEWS_DIRECTORY.rpartition(b"/")[2]


class OwnDirectories:
    def __init__(
        self,
        control: Control,
        catalogue: Catalogue,
        lister: Lister,
        control_attributes: Callable[[ControlAttributes], Attributes],
        attributes: Callable[[int, SourceStat, float], Attributes],
        entry: Callable[[Dentry, float], Entry],
    ) -> None:
        """The last three are those of `Filesystem`, which knows how attributes are shown."""
        self._control = control
        self._catalogue = catalogue
        self._lister = lister
        self._control_attributes = control_attributes
        self._attributes = attributes
        self._entry = entry

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """The entry of a name in a directory that this module `has`, or of `.spiderfs` in the root; raises NotFound."""
        if parent == ROOT_INODE:
            # Whoever opens a file below `views` passes the directory, which stays the same.
            return Entry(self._control_attributes(self._control.getattr(CONTROL_INODE)), FOREVER_S)
        if parent == CONTROL_INODE:
            if name == _VIEWS and self._catalogue.forms.names:
                return self._views()
            return Entry(self._control_attributes(self._control.lookup(name)), 0.0)
        dentry = await self._lister.form(name)
        return no_entry(FOREVER_S) if dentry is None else self._entry(dentry, FOREVER_S)

    @staticmethod
    def has(inode: int) -> bool:
        """Whether this is one of the directories."""
        return inode in (CONTROL_INODE, VIEWS_INODE)

    @staticmethod
    def answers(parent: int, name: bytes) -> bool:
        """Whether `lookup` answers for this name."""
        return parent in (CONTROL_INODE, VIEWS_INODE) or (parent == ROOT_INODE and name == CONTROL_DIRECTORY)

    def readdir(self, inode: int) -> list[tuple[bytes, Entry]]:
        """Names and entries of one of the directories, always in one order."""
        if inode == VIEWS_INODE:
            # The inodes of these depend on what makers make, which takes a tenth of a second to find out.
            found = self._catalogue.node(VIEWS_INODE).stat
            names = enumerate(self._catalogue.forms.names, 1)
            return [(name, without_inode(self._attributes(0, found, 0.0), position)) for position, name in names]
        listed = [(name, Entry(self._control_attributes(found), 0.0)) for name, found in self._control.readdir()]
        return [*listed, (_VIEWS, self._views())] if self._catalogue.forms.names else listed

    def _views(self) -> Entry:
        # Their mode and owner, by which the kernel may have to let readers pass, are those of the root.
        return Entry(self._attributes(VIEWS_INODE, self._catalogue.node(VIEWS_INODE).stat, FOREVER_S), FOREVER_S)


def no_entry(timeout_s: float) -> Entry:
    """The answer that a name does not exist."""
    return Entry(Attributes(0, 0, 0, 0, 0, 0, 0.0), timeout_s)


def without_inode(attributes: Attributes, shown: int) -> Entry:
    """An entry of a listing of which the kernel takes the name alone, and asks for the rest when it needs it."""
    return Entry(attributes._replace(inode=0, shown=shown), 0.0)
