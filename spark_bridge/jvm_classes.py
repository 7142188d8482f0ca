# SPDX-License-Identifier: Apache-2.0

"""Small Java classes of these packages in the driver's JVM, compiled there by Spark's own Janino. Everything blocks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from importlib import resources
from typing import Any

from py4j.protocol import Py4JError

__all__ = ["PROBLEMS", "java_source", "new_object"]

PROBLEMS = (Py4JError, OSError, TypeError, AttributeError)
"""What Py4J raises, ``TypeError`` if a class is missing, ``AttributeError`` if the context has stopped."""

_compiling = threading.Lock()
_compiled: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def java_source(package: str, name: str) -> str:
    """Return the text of ``NAME.java`` in a Python package."""
    return resources.files(package).joinpath(f"{name}.java").read_text(encoding="utf-8")


def new_object(context: Any, name: str, source: Callable[[], str]) -> Any:
    """Make an object of the Java class with this full name, by its constructor without arguments.

    ``context`` is a classic SparkContext. A class is compiled once in the life of a JVM: Py4J caches the methods of a
    class by its name, and for a second class with that name it would call the methods of the first. Raises one of
    ``PROBLEMS`` if the JVM cannot do it.
    """
    gateway = context._gateway
    with _compiling:
        of_this_jvm = _compiled.setdefault(gateway, {})
        if name not in of_this_jvm:
            compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
            compiler.setParentClassLoader(gateway.jvm.java.lang.Thread.currentThread().getContextClassLoader())
            compiler.cook(source())
            of_this_jvm[name] = compiler.getClassLoader().loadClass(name)
        java_class = of_this_jvm[name]
    no_types = gateway.new_array(gateway.jvm.java.lang.Class, 0)
    no_values = gateway.new_array(gateway.jvm.java.lang.Object, 0)
    return java_class.getConstructor(no_types).newInstance(no_values)
