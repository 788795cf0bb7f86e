"""Which binding to the kernel the mounts of a test have; `import mounting` works in every test.

A module or test marked `both_bindings` runs once over each binding. Of such a module, tests marked `kernel_binding` run
over the kernel's own protocol alone; the marker says why. Nothing runs over pyfuse3 again only to have more workers.
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    several = [item for item in items if _asks_for_workers(item)]
    config.hook.pytest_deselected(items=several)
    items[:] = [item for item in items if item not in several]


def _asks_for_workers(item: pytest.Item) -> bool:
    """Whether a test asks for several workers of the binding that serves with one."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    options = parameters.get("options")
    wanted = [parameters.get("workers"), parameters.get("mount")]
    wanted += [options.get("workers")] if isinstance(options, dict) else []
    return parameters.get("binding") == "pyfuse3" and any(isinstance(count, int) and count > 1 for count in wanted)


@pytest.fixture(scope="module", autouse=True)
def binding(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `mounting.mounted` mounts with. A fixture that mounts for a whole module asks for this one."""
    mounting.binding = getattr(request, "param", "kernel")
    yield mounting.binding
    mounting.binding = "kernel"
