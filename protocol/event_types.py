# SPDX-License-Identifier: Apache-2.0

"""The type parameters of coordinators and operators: what they receive and what they send. The default is ``Any``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # the typing module has defaults only from Python 3.13

    Received = TypeVar("Received", default=Any)
    Sent = TypeVar("Sent", default=Any)
    Sent_contra = TypeVar("Sent_contra", default=Any, contravariant=True)
else:
    from typing import TypeVar

    Received = TypeVar("Received")
    Sent = TypeVar("Sent")
    Sent_contra = TypeVar("Sent_contra", contravariant=True)
