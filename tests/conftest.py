"""Which binding to the kernel the mounts of a test have; `import mounting` works in every test.

A module or test marked `both_bindings` runs once over each binding. Of such a module, tests marked `kernel_binding` run
over the kernel's own protocol alone; the marker says why. Single parameters of a test can be marked so too. Nothing
runs over pyfuse3 again only to have more workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import mounting
import pytest

BINDINGS = ("kernel", "pyfuse3")


def pytest_configure(config: pytest.Config) -> None:
    # xdist would begin with the files of the most tests. Files of real mounts have few tests and long ones: at the
    # end one process would wait for the other. By their names they come before the many short tests of units.
    config.option.loadscopereorder = False


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.definition
    if test.get_closest_marker("both_bindings") and not test.get_closest_marker("kernel_binding"):
        metafunc.parametrize("binding", BINDINGS, indirect=True, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    """Whether a test runs over pyfuse3 with a parameter marked `kernel_binding`, or with several workers."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    options = parameters.get("options")
    wanted = [parameters.get(name) for name in ("workers", "mount", "lasting")]
    wanted += [options.get("workers")] if isinstance(options, dict) else []
    several = any(isinstance(count, int) and count > 1 for count in wanted)
    return parameters.get("binding") == "pyfuse3" and (several or item.get_closest_marker("kernel_binding") is not None)


@pytest.fixture(scope="module", autouse=True)
def binding(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `mounting.mounted` mounts with. A fixture that mounts for a whole module asks for this one."""
    mounting.binding = getattr(request, "param", "kernel")
    yield mounting.binding
    mounting.binding = "kernel"
