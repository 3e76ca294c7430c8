"""How the tests of the exercises' checks (test_checks_CHAPTER_LESSON.py) say that an answer passes or is rejected."""

from collections.abc import Callable

import pytest


def stub(*arguments):
    raise NotImplementedError


def assert_accepts(check: Callable, answer, capsys) -> None:
    """Both in a lesson and in the solutions."""
    assert check(answer) is True
    assert check(answer, strict=True) is True
    assert all(line.startswith("[OK] Exercise ") for line in capsys.readouterr().out.splitlines())


def assert_rejects(check: Callable, answer, because: str, capsys) -> None:
    """In a lesson by one line that contains `because`, in the solutions by an AssertionError with the same words."""
    assert check(answer) is False
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[  ] Exercise ") and because in line
    with pytest.raises(AssertionError) as caught:
        check(answer, strict=True)
    assert line == f"[  ] {caught.value}"
