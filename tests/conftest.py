"""Which binding to the kernel the mounts of a test have; `import mounting` works in every test.

A module or test marked `both_bindings` runs once over each binding; one marked `kernel_binding` needs what only the
kernel's own protocol has, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import mounting
import pytest

BINDINGS = ("kernel", "pyfuse3")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.definition
    if test.get_closest_marker("both_bindings") and not test.get_closest_marker("kernel_binding"):
        metafunc.parametrize("binding", BINDINGS, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def binding(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `mounting.mounted` mounts with. A fixture that mounts for a whole module asks for this one."""
    mounting.binding = getattr(request, "param", "kernel")
    yield mounting.binding
    mounting.binding = "kernel"
