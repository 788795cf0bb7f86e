"""Parts that tests and benchmarks use in place of the real ones, and the file system without a daemon around it.

`MemoryContent` and `MemorySource` pass the same contract tests as the store and the sources of a mount
(`tests/contract`).
"""

from spiderfs.testing.bare import Bare as Bare
from spiderfs.testing.bare import NoEvents as NoEvents
from spiderfs.testing.bare import NoManager as NoManager
from spiderfs.testing.bare import bare_filesystem as bare_filesystem
from spiderfs.testing.bare import make_older as make_older
from spiderfs.testing.bare import notes_of_sole_worker as notes_of_sole_worker
from spiderfs.testing.fake_kernel import FakeKernel as FakeKernel
from spiderfs.testing.hook_sink import RecordingSink as RecordingSink
from spiderfs.testing.memory_content import MemoryContent as MemoryContent
from spiderfs.testing.memory_source import MemorySource as MemorySource
