# SPDX-License-Identifier: Apache-2.0

"""Small Java classes of this package in the driver's JVM, compiled there by Spark's own Janino. Everything blocks."""

from __future__ import annotations

import threading
import weakref
from importlib import resources
from typing import Any

from py4j.protocol import Py4JError

__all__ = ["PROBLEMS", "new_object"]

PROBLEMS = (Py4JError, OSError, TypeError, AttributeError)
"""What Py4J raises, ``TypeError`` if a class is missing, ``AttributeError`` if the context has stopped."""

_compiling = threading.Lock()
_compiled: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def new_object(context: Any, name: str) -> Any:
    """Make an object of the class ``headgate.observability.NAME``, whose source is ``NAME.java``.

    ``context`` is a classic SparkContext. A class is compiled once in the life of a JVM, because Py4J caches the
    methods of a class by its name. Raises one of ``PROBLEMS`` if the JVM cannot do it.
    """
    gateway = context._gateway
    java_class = _class(gateway, name)
    no_types = gateway.new_array(gateway.jvm.java.lang.Class, 0)
    no_values = gateway.new_array(gateway.jvm.java.lang.Object, 0)
    return java_class.getConstructor(no_types).newInstance(no_values)


def _class(gateway: Any, name: str) -> Any:
    with _compiling:
        of_this_jvm = _compiled.setdefault(gateway, {})
        if name not in of_this_jvm:
            source = resources.files(__package__).joinpath(f"{name}.java").read_text(encoding="utf-8")
            compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
            compiler.setParentClassLoader(gateway.jvm.java.lang.Thread.currentThread().getContextClassLoader())
            compiler.cook(source)
            of_this_jvm[name] = compiler.getClassLoader().loadClass(f"headgate.observability.{name}")
        return of_this_jvm[name]
