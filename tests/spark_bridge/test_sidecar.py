# SPDX-License-Identifier: Apache-2.0

"""What users see of the sidecar's methods."""

from __future__ import annotations

from inspect import iscoroutinefunction, signature

from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.driver.sidecar import Sidecar


def test_coordinate_has_the_same_arguments_on_the_sidecar_and_on_its_runtime() -> None:
    assert signature(Sidecar.coordinate) == signature(SidecarRuntime.coordinate)
    assert "parallelism" in signature(Sidecar.coordinate).parameters
    assert not iscoroutinefunction(Sidecar.coordinate)
    assert Sidecar.coordinate.__name__ == "coordinate"
    assert (Sidecar.coordinate.__doc__ or "").startswith("Start ``coordinator``")
