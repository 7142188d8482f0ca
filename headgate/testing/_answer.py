# SPDX-License-Identifier: Apache-2.0

"""The pending or known answer to a request of a test."""

from __future__ import annotations

from typing import Generic, TypeVar

from protocol.arguments import checked

T = TypeVar("T")


class Answer(Generic[T]):
    """The answer to a request, or the outcome of a checkpoint. It arrives while the test moves the world."""

    def __init__(self) -> None:
        self._value: list[T] = []
        self.error: BaseException | None = None
        """Why there is no value; None while the answer is open, and if there is a value."""

    @property
    def done(self) -> bool:
        """Whether there is a value or an error."""
        return bool(self._value) or self.error is not None

    @property
    def open(self) -> bool:
        """The opposite of ``done``."""
        return not self.done

    @property
    def value(self) -> T:
        """The value.

        Raises:
            AssertionError: the answer is still open.
            BaseException: ``error``, if the answer is one.
        """
        if self.error is not None:
            raise self.error
        if not self._value:
            raise AssertionError("there is no answer yet: await world.settle(), or let time pass with world.advance()")
        return self._value[0]

    def answer(self, value: T) -> bool:
        """Give the value. Returns False if there already was an answer, which stays."""
        if self.done:
            return False
        self._value.append(value)
        return True

    @checked()
    def fail(self, error: BaseException) -> bool:
        """Give an error instead of a value. Returns False if there already was an answer, which stays."""
        if self.done:
            return False
        self.error = error
        return True

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Answer error={self.error!r}>"
        return f"<Answer value={self._value[0]!r}>" if self._value else "<Answer open>"
