# SPDX-License-Identifier: Apache-2.0

"""An extension of griffe, for `make docs`: methods that take their arguments from another method.

`Sidecar.coordinate` is written as `@_on_its_loop(SidecarRuntime.coordinate)`. Type checkers and `help` see the
arguments, but griffe reads only the source. So the arguments are copied here.
"""

from __future__ import annotations

from typing import Any

import griffe

DECORATOR = "_on_its_loop"


class TakenSignatures(griffe.Extension):
    """Copies arguments and result from the method that is named in the decorator."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path == "spark_bridge":
            _copy_signatures(pkg, loader)


def _copy_signatures(container: griffe.Object, loader: griffe.GriffeLoader) -> None:
    for member in container.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Function):
            for decorator in member.decorators:
                if isinstance(call := decorator.value, griffe.ExprCall) and str(call.function) == DECORATOR:
                    source = loader.modules_collection[call.arguments[0].canonical_path]
                    member.parameters = source.parameters
                    member.returns = source.returns
        else:
            _copy_signatures(member, loader)
