"""Parts that tests and benchmarks use in place of the real ones, and the file system without a daemon around it.

`MemoryContent` and `MemorySource` pass the same contract tests as the store and the sources of a mount
(`tests/contract`).
"""

from spiderfs.testing.bare import Bare, NoEvents, NoManager, bare_filesystem
from spiderfs.testing.fake_kernel import FakeKernel
from spiderfs.testing.guided_policy import RecordingPolicy
from spiderfs.testing.hook_sink import RecordingSink
from spiderfs.testing.lists import course, known_list, sample_list
from spiderfs.testing.memory_content import MemoryContent
from spiderfs.testing.memory_source import MemorySource
from spiderfs.testing.old_files import make_older
from spiderfs.testing.sole_worker import notes_of_sole_worker

__all__ = [
    "Bare",
    "FakeKernel",
    "MemoryContent",
    "MemorySource",
    "NoEvents",
    "NoManager",
    "RecordingPolicy",
    "RecordingSink",
    "bare_filesystem",
    "course",
    "known_list",
    "make_older",
    "notes_of_sole_worker",
    "sample_list",
]
