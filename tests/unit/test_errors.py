"""The tree of errors in the docstring of its module."""

from __future__ import annotations

import errno
import inspect

from spiderfs import errors


def test_the_docstring_draws_every_error_with_its_errno() -> None:
    drawn = inspect.getdoc(errors) or ""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.SpiderfsError)]
    assert len(kinds) > 20
    assert [kind for kind in kinds if f"{kind.__name__} ({errno.errorcode[kind.errno]})" not in drawn] == []
