# SPDX-License-Identifier: Apache-2.0

"""The compiled relay is what its Java sources say (``make relay``)."""

from __future__ import annotations

import io
import zipfile

import pytest

from spark_bridge.bridge.relay_jar import jar_bytes, sources_digest
from tests.release.relay_jar import build, javac, javac_release, manifest_of

AGAIN = "run `make relay`, and commit spark_bridge/bridge/relay.jar"


def test_the_jar_was_built_from_the_sources_of_this_commit() -> None:
    assert manifest_of(jar_bytes())["Headgate-Sources"] == sources_digest()[:40], AGAIN


def test_the_same_sources_give_the_same_bytes() -> None:
    compiler = javac()
    if compiler is None:
        pytest.skip("JAVA_HOME has no compiler; the digest of the sources is compared in any case")
    if javac_release(compiler) != manifest_of(jar_bytes())["Headgate-Javac"]:
        pytest.skip("another release of the compiler may write other bytes; the digest is compared in any case")

    assert build(compiler) == jar_bytes(), AGAIN


def test_the_jar_has_the_relay_and_nothing_that_spark_has() -> None:
    with zipfile.ZipFile(io.BytesIO(jar_bytes())) as jar:
        names = jar.namelist()
        dates = {entry.date_time for entry in jar.infolist()}

    assert names[0] == "META-INF/MANIFEST.MF"
    assert all(name.startswith("headgate/relay/") for name in names[1:])
    assert "headgate/relay/SessionFunction.class" in names
    assert "headgate/relay/InstalledRelays.class" in names
    assert dates == {(1980, 1, 1, 0, 0, 0)}
