# SPDX-License-Identifier: Apache-2.0

"""The type parameters of coordinators, operators and handles: what a coordinator and its tasks send each other.

The default is ``Any``, so a program that does not name its types is not checked. What receives more types than are sent
to it fits, and so does what sends fewer types than the other half receives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # the typing module has defaults only from Python 3.13

    Received = TypeVar("Received", default=Any, contravariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent = TypeVar("Sent", default=Any, covariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent_contra = TypeVar("Sent_contra", default=Any, contravariant=True)
    Output = TypeVar("Output", default=Any)
else:
    from typing import TypeVar

    Received = TypeVar("Received", contravariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent = TypeVar("Sent", covariant=True)  # noqa: PLC0105 - readers of signatures see the name
    Sent_contra = TypeVar("Sent_contra", contravariant=True)
    Output = TypeVar("Output")
