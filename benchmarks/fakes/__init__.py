"""Parts that benchmarks and tests use in place of the real ones, and the file system without a daemon around it.

`MemoryContent` and `MemorySource` pass the same contract tests as the store and the sources of a mount
(`tests/contract`).
"""

from benchmarks.fakes.bare import Bare as Bare
from benchmarks.fakes.bare import NoEvents as NoEvents
from benchmarks.fakes.bare import NoManager as NoManager
from benchmarks.fakes.bare import bare_filesystem as bare_filesystem
from benchmarks.fakes.bare import notes_of_sole_worker as notes_of_sole_worker
from benchmarks.fakes.fake_kernel import FakeKernel as FakeKernel
from benchmarks.fakes.hook_sink import RecordingSink as RecordingSink
from benchmarks.fakes.memory_content import MemoryContent as MemoryContent
from benchmarks.fakes.memory_source import MemorySource as MemorySource
