"""What a server has asked its engine and waits to hear: who asked, by the number that the answer will carry."""

from typing import Generic, TypeVar

from cluster.core.errors import IntegrityError

Who = TypeVar("Who")


class Questions(Generic[Who]):
    """Questions of one kind. False when none is open."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = 0
        self._open: dict[int, Who] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def ask(self, who: Who) -> int:
        """The number of a new question."""
        self._last += 1
        self._open[self._last] = who
        return self._last

    def answered(self, number: int) -> Who:
        """Who asked it. Raises IntegrityError for an answer to nothing."""
        try:
            return self._open.pop(number)
        except KeyError:
            raise IntegrityError(f"{self._what} {number} came but was never asked for") from None
