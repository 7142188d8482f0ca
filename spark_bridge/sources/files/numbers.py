# SPDX-License-Identifier: Apache-2.0

"""Numbers in lines of text: which of them the type of a column would change.

A double has 15 to 17 digits, and ends at 1.8e308. So an account number that looks like a number is none, and no schema
may change a number that comes later (H171).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pyarrow

from spark_bridge.common.arrow_types import DECIMAL_DIGITS

_SAFE_DIGITS = {"double": 15, "float": 6, "halffloat": 3}
_SAFE_EXPONENT_DIGITS = {"double": 2, "float": 1, "halffloat": 0}
_RANGES = {"double": (sys.float_info.min, sys.float_info.max), "float": (2.0**-126, 2.0**128 - 2.0**104)}
"""Between them, a number with safe digits is kept, whatever its exponent; 0 may have been another number."""
_AS_ZEROS = bytes.maketrans(b"123456789.", b"0" * 10)


def perhaps_changed(wanted: Any) -> str:
    """A regular expression for the numbers that a floating-point type may change; most numbers do not match it."""
    digits, exponent = _SAFE_DIGITS[str(wanted)] + 1, _SAFE_EXPONENT_DIGITS[str(wanted)] + 1
    return rf"(?:[0-9]\.?){{{digits}}}|[eE][+-]?[0-9]{{{exponent}}}"


def has_many_digits(block: bytes, wanted: Any) -> bool:
    """Whether there are as many digits in a row as ``perhaps_changed`` finds; it may say so of fewer, in short numbers.

    It looks at a quarter of the bytes, which takes a third of the time of a regular expression. ``json_as_format``
    shows it: without this, the expression takes a tenth of its processor time.
    """
    digits = _SAFE_DIGITS[str(wanted)] + 1
    step = max(1, digits // 4)
    return b"0" * (digits // step) in block[::step].translate(_AS_ZEROS)


def has_limits(values: pyarrow.Array) -> bool:
    """Whether a double or a float is so near 0, or so far from it, that it may have been another number."""
    from pyarrow import compute  # a new worker would need 50 ms for it, also without such numbers

    lowest, highest = _RANGES[str(values.type)]
    found = compute.min_max(compute.abs(values)).as_py()
    return found["min"] is not None and not lowest <= found["min"] <= found["max"] <= highest


def changes(number: Decimal, wanted: Any) -> bool:
    """Whether a floating-point type, written with as many digits, would be another number."""
    if not number.is_finite():
        return False
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
    kept = pyarrow.scalar(float(number), wanted).as_py()
    return Decimal(f"{kept:.{max(0, len(digits) - 1)}e}") != number


def decimal_for(numbers: Iterable[Decimal]) -> Any:
    """The type of Arrow that holds all these numbers as they are; None if there is none."""
    scale = whole = 0
    for number in numbers:
        if not number.is_finite():
            return None
        digits, exponent = number.as_tuple()[1:]
        assert isinstance(exponent, int)
        scale = max(scale, -exponent)
        whole = max(whole, len(digits) + exponent)
    return pyarrow.decimal128(DECIMAL_DIGITS, scale) if whole + scale <= DECIMAL_DIGITS else None
