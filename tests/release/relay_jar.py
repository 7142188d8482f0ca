# SPDX-License-Identifier: Apache-2.0

"""Builds ``relay.jar`` from its Java sources: ``python -m tests.release.relay_jar`` (make relay).

The same sources and the same release of Java give the same bytes: no debug information, no dates, sorted names. The
manifest says from which sources, and with which Java, the jar was built.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pyspark

from spark_bridge.bridge.jvm_classes import java_source
from spark_bridge.bridge.relay_jar import SOURCES, sources_digest

_ROOT = Path(__file__).resolve().parent.parent.parent
JAR = _ROOT / "spark_bridge" / "bridge" / "relay.jar"
_FIND_JAVA = _ROOT / ".ci" / "find-java"


def javac() -> Path | None:
    """The compiler of the Java that Spark runs on here; None if that is a runtime only."""
    home = os.environ.get("JAVA_HOME")
    if home is None:
        home = subprocess.run([_FIND_JAVA], capture_output=True, text=True, check=False).stdout.strip()
    compiler = Path(home, "bin", "javac")
    return compiler if compiler.is_file() else None


def javac_release(compiler: Path) -> str:
    """The compiler's release, such as ``17``: another one may write other bytes."""
    said = subprocess.run([compiler, "-version"], capture_output=True, text=True, check=True)
    found = re.search(r"javac (\d+)", said.stdout + said.stderr)
    assert found is not None, said
    return found[1]


def compile_classes(compiler: Path, changed: Mapping[str, str]) -> dict[str, bytes]:
    """Compile the sources for Java 17 against this PySpark's jars; returns the classes by their names in the jar."""
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    with tempfile.TemporaryDirectory(prefix="headgate-relay-") as folder:
        paths = []
        for package, name in SOURCES:
            paths.append(Path(folder, name))
            paths[-1].write_text(
                changed.get(name) or java_source(package, name.removesuffix(".java")), encoding="utf-8"
            )
        out = Path(folder, "classes")
        options = ["--release", "17", "-g:none", "-nowarn", "-XDsuppressNotes", "-proc:none"]
        subprocess.run([compiler, *options, "-cp", str(jars), "-d", out, *paths], check=True)
        return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*.class"))}


def build(compiler: Path, changed: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The jar, as bytes. ``changed``: texts in place of those of some sources, by name."""
    manifest = (
        "Manifest-Version: 1.0\r\n"
        f"Headgate-Sources: {sources_digest()[:40]}\r\n"
        f"Headgate-Javac: {javac_release(compiler)}\r\n\r\n"
    )
    entries = {"META-INF/MANIFEST.MF": manifest.encode(), **compile_classes(compiler, changed)}
    jar = io.BytesIO()
    with zipfile.ZipFile(jar, "w") as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_STORED)  # zlib's releases compress differently
    return jar.getvalue()


def manifest_of(jar: bytes) -> dict[str, str]:
    """The entries of the jar's manifest."""
    with zipfile.ZipFile(io.BytesIO(jar)) as archive:
        lines = archive.read("META-INF/MANIFEST.MF").decode().split("\r\n")
    return dict(line.split(": ", 1) for line in lines if line)


def main() -> None:
    compiler = javac()
    if compiler is None:
        raise SystemExit("the Java of JAVA_HOME has no javac: install a JDK (17 or later), not only a JRE")
    jar = build(compiler)
    JAR.write_bytes(jar)
    print(f"{JAR.name}: {len(jar)} bytes, javac {javac_release(compiler)}")


if __name__ == "__main__":
    main()
