"""The errno of each error, and what is said of it."""

from __future__ import annotations

import errno
import inspect

from spiderfs import errors


def test_every_error_has_an_errno_and_says_when_it_is_raised() -> None:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.SpiderfsError)]
    assert len(kinds) > 20
    assert [kind for kind in kinds if kind.errno not in errno.errorcode] == []
    # Without a docstring of its own, the error is named after its errno.
    assert [kind for kind in kinds if not kind.__doc__ and "errno" not in vars(kind)] == []
