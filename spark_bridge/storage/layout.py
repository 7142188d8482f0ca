# SPDX-License-Identifier: Apache-2.0

"""The file names in a storage (pure).

```
ROOT/_ids/EPOCH-LAST-TOKEN                            a claim: an empty file
ROOT/OPERATOR/checkpoint-ID.hgc                       a complete checkpoint
ROOT/OPERATOR/checkpoint-ID.hgc.EPOCH-TOKEN.tmp       a checkpoint that is being written
ROOT/OPERATOR/void-ID-EPOCH-TOKEN                     a void marker: an empty file; the checkpoint was discarded
ROOT/OPERATOR/restored-EPOCH-NUMBER-BASE-FIRST-TOKEN  a restore record: an empty file; see ``validity``
ROOT/OPERATOR/state/...                               files of states; see ``state_files.folder``
ROOT/_caches/NAME/values-NUMBER-TOKEN.hgv             values of a durable cache; see ``value_log``
DIRECTORY/savepoint-OPERATOR-ID-TOKEN.hgc             a savepoint, in a directory of the user's
DIRECTORY/savepoint-OPERATOR-ID-TOKEN.hgc.tmp         a savepoint that is being written
DIRECTORY/savepoint-OPERATOR-ID-TOKEN.state/...       files of the states in it
```

EPOCH counts the applications that have used the storage. TOKEN is random for each application. That of a savepoint is
random for each savepoint, because applications with separate storages assign the same ids and may write into one
directory. LAST is the highest id that the application has reserved. NUMBER counts the restores of an application, BASE
is what it restored, and FIRST is the first id that it may use for the operator. OPERATOR is the operator id,
percent-quoted. A long one is cut and ends in a digest. NAME is the name of a cache, quoted alike. Among its files, the
one with the higher NUMBER is the later one, and TOKEN is random for each file.

A name whose numbers exceed ``ID_MAX`` or ``EPOCH_MAX`` counts as a name that is not ours (``why_ignored``). Otherwise
anybody who can create a file here could use up all ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

from protocol.wire.checkpoint_format import CHECKPOINT_ID_MAX

CLAIMS_FOLDER = "_ids"
CACHES_FOLDER = "_caches"
STATES_FOLDER = "state"
"""In the folder of an operator."""
SUFFIX = ".hgc"
ID_MAX = CHECKPOINT_ID_MAX
EPOCH_MAX = 2**31 - 1
"""The highest number of an application: one start a second would reach it after 68 years."""

_NAME_BYTES_MAX = 160  # file systems allow 255 for a name, and a savepoint's holds more than the operator
_CLAIM = re.compile(r"([0-9]{1,20})-([0-9]{1,20})-([0-9a-f]{1,64})")
_CHECKPOINT = re.compile(r"checkpoint-([1-9][0-9]{0,18})\.hgc")
_VOID = re.compile(r"void-([1-9][0-9]{0,18})-([0-9]{1,20})-([0-9a-f]{1,64})")
_RESTORED = re.compile(r"restored-([0-9]{1,20})-([0-9]{1,10})-([0-9]{1,19})-([1-9][0-9]{0,18})-([0-9a-f]{1,64})")
_SAVEPOINT_FOLDER = re.compile(r"savepoint-.+-[1-9][0-9]{0,18}-[0-9a-f]{16}\.state")
_TEMPORARY = re.compile(r"checkpoint-([1-9][0-9]{0,18})\.hgc\.([0-9]{1,20})-([0-9a-f]{1,64})\.tmp")
_VALUES = re.compile(r"values-([1-9][0-9]{0,18})-[0-9a-f]{1,64}\.hgv")
_LIKE_OURS = re.compile(
    r"[1-9][0-9]*-[0-9]+-[0-9a-f]+|checkpoint-[1-9][0-9]*\.hgc(\.[0-9]+-[0-9a-f]+\.tmp)?|void-[1-9][0-9]*-[0-9]+-[0-9a-f]+"
    r"|restored-[0-9]+-[0-9]+-[0-9]+-[1-9][0-9]*-[0-9a-f]+"
)


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """One application's use of a storage. The greater one is the later one, and fences the other."""

    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class Claim:
    """The meaning of a claim's name: ``owner`` has reserved every id up to ``last``."""

    owner: Owner
    last: int

    @property
    def name(self) -> str:
        return f"{self.owner.epoch}-{self.last}-{self.owner.token}"


@dataclass(frozen=True, slots=True, order=True)
class RestoreRecord:
    """``owner`` has started an operator from ``base`` (0 for nothing), and continues with ids from ``first``.

    The greater record is the later one. ``number`` counts the records of one owner.
    """

    owner: Owner
    number: int
    base: int
    first: int

    def __post_init__(self) -> None:
        if not 0 <= self.base < self.first <= ID_MAX:
            raise ValueError(f"base must be below first, and both must be ids: {self}")

    @property
    def name(self) -> str:
        return f"restored-{self.owner.epoch}-{self.number}-{self.base}-{self.first}-{self.owner.token}"


def parse_claim(name: str) -> Claim | None:
    """The claim in the name of a file; None for any other file."""
    match = _CLAIM.fullmatch(name)
    if match is None or int(match[1]) > EPOCH_MAX or int(match[2]) > ID_MAX:
        return None
    return Claim(Owner(int(match[1]), match[3]), int(match[2]))


def void_name(checkpoint_id: int, owner: Owner) -> str:
    if not 0 < checkpoint_id <= ID_MAX:
        raise ValueError(f"invalid checkpoint id: {checkpoint_id}")
    return f"void-{checkpoint_id}-{owner.epoch}-{owner.token}"


def parse_void(name: str) -> tuple[int, Owner] | None:
    """The id in the name of a void marker, and the application that wrote it; None for any other file."""
    match = _VOID.fullmatch(name)
    if match is None or int(match[1]) > ID_MAX or int(match[2]) > EPOCH_MAX:
        return None
    return int(match[1]), Owner(int(match[2]), match[3])


def parse_record(name: str) -> RestoreRecord | None:
    """The record in the name of a file; None for any other file, and for an invalid record."""
    match = _RESTORED.fullmatch(name)
    if match is None or int(match[1]) > EPOCH_MAX:
        return None
    try:
        return RestoreRecord(Owner(int(match[1]), match[5]), int(match[2]), int(match[3]), int(match[4]))
    except ValueError:
        return None


def operator_folder(operator_id: str) -> str:
    """The name of an operator's folder. It is unique to the operator, and different from the storage's own names."""
    if not operator_id:
        raise ValueError("an operator id must not be empty")
    quoted = quote(operator_id, safe="")
    if quoted[0] in "._~-":  # "." and ".." are not names, "_" is the storage's own
        quoted = f"%{ord(quoted[0]):02X}{quoted[1:]}"
    if len(quoted) <= _NAME_BYTES_MAX:
        return quoted
    digest = sha256(quoted.encode()).hexdigest()[:32]
    return f"{quoted[: _NAME_BYTES_MAX - 33]}={digest}"  # "=" is in no quoted name


def checkpoint_name(checkpoint_id: int) -> str:
    return f"checkpoint-{checkpoint_id}{SUFFIX}"


def parse_checkpoint(name: str) -> int | None:
    """The id in the name of a checkpoint file; None for any other file."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= ID_MAX else None


def savepoint_name(operator_id: str, checkpoint_id: int, token: str) -> str:
    return f"savepoint-{operator_folder(operator_id)}-{checkpoint_id}-{token}{SUFFIX}"


def savepoint_folder(name: str) -> str:
    """The folder beside a savepoint that has the files of its states."""
    return f"{name.removesuffix(SUFFIX)}.state"


def is_savepoint_folder(name: str) -> bool:
    return _SAVEPOINT_FOLDER.fullmatch(name) is not None


def is_savepoint(name: str) -> bool:
    """Whether a checkpoint file with this name is a savepoint."""
    return name.startswith("savepoint-")


def cache_folder(name: str) -> str:
    """The path of the folder of a durable cache."""
    return f"{CACHES_FOLDER}/{operator_folder(name)}"


def values_name(number: int, token: str) -> str:
    return f"values-{number}-{token}.hgv"


def parse_values(name: str) -> int:
    """The number in the name of a file of a durable cache; 0 for any other file."""
    match = _VALUES.fullmatch(name)
    return int(match[1]) if match else 0


def temporary_name(name: str, owner: Owner) -> str:
    return f"{name}.{owner.epoch}-{owner.token}.tmp"


def parse_temporary(name: str) -> tuple[int, Owner] | None:
    """The id of a checkpoint that was being written under this name, and by whom; None for any other file."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or int(match[1]) > ID_MAX or int(match[2]) > EPOCH_MAX:
        return None
    return int(match[1]), Owner(int(match[2]), match[3])


def why_ignored(name: str) -> str:
    """The reason why a name that looks like one of ours is ignored; empty for any other name, and for a valid one."""
    if not _LIKE_OURS.fullmatch(name):
        return ""
    if any(
        parse(name) is not None for parse in (parse_claim, parse_void, parse_record, parse_checkpoint, parse_temporary)
    ):
        return ""
    return f"it names a checkpoint above {ID_MAX}, or an application above {EPOCH_MAX}, or contradicts itself"
