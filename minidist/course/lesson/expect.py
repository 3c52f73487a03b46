"""Checks that a lesson which breaks something on purpose breaks in the way that it announces.

Proved by: tests/lesson/test_checker.py
"""

from types import TracebackType


class expect:
    """`with expect(DeadlockError) as caught:` swallows that exception and prints its message; `caught.error` is it.

    No exception, or another one, is an AssertionError: the cell, and with it the build of the notebook, fails.
    """

    def __init__(self, *classes: type[BaseException]) -> None:
        self.classes = classes
        self.error: BaseException | None = None

    def __enter__(self) -> "expect":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        wanted = " or ".join(cls.__name__ for cls in self.classes)
        if error is None:
            raise AssertionError(f"expected {wanted}, but nothing was raised")
        if not isinstance(error, self.classes):
            raise AssertionError(f"expected {wanted}, but got {type(error).__name__}: {error}") from error
        self.error = error
        name = next(cls.__name__ for cls in self.classes if isinstance(error, cls))
        print(f"{name}: {error}", *getattr(error, "__notes__", ()), sep="\n  ")
        return True
