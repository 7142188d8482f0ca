# SPDX-License-Identifier: Apache-2.0

"""Small Java classes of these packages in the driver's JVM. Everything blocks.

They are loaded from a jar, or compiled there by Spark's own Janino, if what they call differs between Spark's releases.
A class comes to a JVM only once: Py4J caches the methods of a class by its name, and for a second class with that name
it would call the methods of the first.
"""

from __future__ import annotations

import threading
import weakref
import zipfile
from collections.abc import Callable
from contextlib import closing
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

__all__ = ["cause_of", "has_stopped", "java_source", "new_compiled_object", "new_packaged_object", "problems"]


def problems() -> tuple[type[Exception], ...]:
    """What Py4J raises, ``TypeError`` if a class is missing, ``AttributeError`` if the context has stopped.

    For ``except problems():``. Py4J is imported here because a client of Spark Connect may have none.
    """
    from py4j.protocol import Py4JError

    return Py4JError, OSError, TypeError, AttributeError


def has_stopped(context: Any) -> bool:
    """Whether a classic SparkContext has stopped, or stops right now. Blocks."""
    try:
        return bool(context._jsc.sc().isStopped())
    except problems():
        return True


def cause_of(problem: Exception) -> str:
    """What the JVM says about a problem, without the stack. Blocks."""
    java_exception = getattr(problem, "java_exception", None)
    try:
        return repr(problem) if java_exception is None else str(java_exception.toString())
    except problems():
        return repr(problem)


_loading = threading.Lock()
_loaded: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def java_source(package: str, name: str) -> str:
    """Return the text of ``NAME.java`` in a Python package."""
    return resources.files(package).joinpath(f"{name}.java").read_text(encoding="utf-8")


def new_compiled_object(context: Any, name: str, source: Callable[[], str]) -> Any:
    """Make an object of the Java class with this full name, by its constructor without arguments.

    ``context`` is a classic SparkContext. ``source`` returns the text of the class. Raises one of ``problems()`` if the
    JVM cannot compile it.
    """
    return _new_object(context, name, lambda gateway: _compile(gateway, name, source()))


def new_packaged_object(context: Any, name: str, jar: Traversable) -> Any:
    """The same, with the compiled class and its nested classes from a jar.

    The jar may lie anywhere in the package, also in a zip file, and the JVM does not keep it open. Raises one of
    ``problems()`` if the JVM cannot load the class, and ``zipfile.BadZipFile`` if the file is not a jar.
    """
    return _new_object(context, name, lambda gateway: _load(gateway, name, jar))


def _new_object(context: Any, name: str, find_class: Callable[[Any], Any]) -> Any:
    gateway = context._gateway
    with _loading:
        of_this_jvm = _loaded.setdefault(gateway, {})
        if name not in of_this_jvm:
            of_this_jvm[name] = find_class(gateway)
        java_class = of_this_jvm[name]
    no_types = gateway.new_array(gateway.jvm.java.lang.Class, 0)
    no_values = gateway.new_array(gateway.jvm.java.lang.Object, 0)
    return java_class.getConstructor(no_types).newInstance(no_values)


def _compile(gateway: Any, name: str, source: str) -> Any:
    compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(_sparks_loader(gateway))
    compiler.cook(source)
    return compiler.getClassLoader().loadClass(name)


def _load(gateway: Any, name: str, jar: Traversable) -> Any:
    with resources.as_file(jar) as path:
        with zipfile.ZipFile(path) as archive:
            classes = [entry.removesuffix(".class").replace("/", ".") for entry in archive.namelist()]
        urls = gateway.new_array(gateway.jvm.java.net.URL, 1)
        urls[0] = gateway.jvm.java.io.File(str(path)).toURI().toURL()
        with closing(gateway.jvm.java.net.URLClassLoader(urls, _sparks_loader(gateway))) as loader:
            for nested in classes:
                if nested.startswith(f"{name}$"):
                    loader.loadClass(nested)
            return loader.loadClass(name)


def _sparks_loader(gateway: Any) -> Any:
    return gateway.jvm.java.lang.Thread.currentThread().getContextClassLoader()
