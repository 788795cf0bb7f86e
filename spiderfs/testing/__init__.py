"""What tests and benchmarks use in place of the real parts, and the file system without a daemon around it.

The fakes here pass the contract tests of what they stand for (`tests/contract`).
"""

from spiderfs.testing.bare import Bare, NoEvents, NoManager, bare_filesystem
from spiderfs.testing.fake_kernel import FakeKernel
from spiderfs.testing.hook_sink import RecordingSink

__all__ = ["Bare", "FakeKernel", "NoEvents", "NoManager", "RecordingSink", "bare_filesystem"]
