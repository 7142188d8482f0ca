# SPDX-License-Identifier: Apache-2.0

"""The types of what a coordinator and its tasks send each other: parameters of coordinators, operators and handles.

The default is ``Any``, so a program that does not name its types is not checked. What receives more types than are sent
to it fits, and so does what sends fewer types than the other half receives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # the typing module has defaults only from Python 3.13

    Received = TypeVar("Received", default=Any, contravariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent = TypeVar("Sent", default=Any, covariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent_contra = TypeVar("Sent_contra", default=Any, contravariant=True)
    Answer = TypeVar("Answer", default=Any, covariant=True)  # noqa: PLC0105
    Answered = TypeVar("Answered", default=Any, contravariant=True)  # noqa: PLC0105
    Output = TypeVar("Output", default=Any)
else:
    from typing import TypeVar

    Received = TypeVar("Received", contravariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent = TypeVar("Sent", covariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent_contra = TypeVar("Sent_contra", contravariant=True)
    Answer = TypeVar("Answer", covariant=True)  # noqa: PLC0105
    Answered = TypeVar("Answered", contravariant=True)  # noqa: PLC0105
    Output = TypeVar("Output")


class Request(Generic[Answer]):
    """The base of a class of requests whose answers are of one type, so that a type checker knows ``context.request``::

        @headgate.event
        @dataclass(frozen=True)
        class Ask(Request[int]):
            permits: int

    ``context.request(Ask(3))`` is an int then. Register the class with ``event``, as every class that is sent. The
    coordinator gets it in ``handle_request``, whose annotations say what it answers.
    """

    __slots__ = ()
