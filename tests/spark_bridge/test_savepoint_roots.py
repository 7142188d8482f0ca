# SPDX-License-Identifier: Apache-2.0

"""Where savepoints may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig, StorageDetails
from spark_bridge.driver.operators import check_savepoint_directory


def test_a_root_and_what_lies_below_it_are_allowed(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "a" / "b", f"{tmp_path}/", f"{tmp_path}/a/../b", f"file://{tmp_path}/c"):
        check_savepoint_directory(directory, ["/nowhere", tmp_path])
    check_savepoint_directory("s3://bucket/jobs/words", ["s3://bucket/jobs"])
    check_savepoint_directory("/anything", ["/"])


@pytest.mark.parametrize("below", ["..", "../jobs2", "a/../../elsewhere"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, below: str) -> None:
    root = tmp_path / "jobs"
    with pytest.raises(SidecarError, match=f"its configuration allows {root}"):
        check_savepoint_directory(root / below, [root])


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(SidecarError, match="savepoint_roots"):
        check_savepoint_directory(root / "link", [root])


@pytest.mark.parametrize(
    "directory", ["s3://bucket/jobs2", "s3://bucket/jobs/../other", "gs://bucket/jobs", "s3://bucket", "/bucket/jobs"]
)
def test_a_url_elsewhere_is_refused(directory: str) -> None:
    with pytest.raises(SidecarError, match="allows s3://bucket/jobs"):
        check_savepoint_directory(directory, ["s3://bucket/jobs"])


@pytest.mark.parametrize("roots", ["/data", Path("/data")])
def test_one_directory_in_place_of_a_list_is_refused(roots: Any) -> None:
    with pytest.raises(TypeError, match=r"savepoint_roots must be a list .*, not .*/data"):
        SidecarConfig(storage_details=StorageDetails(savepoint_roots=roots))


def test_without_roots_nothing_is_allowed() -> None:
    with pytest.raises(SidecarError, match="allows none"):
        check_savepoint_directory("/anywhere", [])
