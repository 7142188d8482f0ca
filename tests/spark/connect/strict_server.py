# SPDX-License-Identifier: Apache-2.0

"""A gRPC line to a Spark Connect server that forbids what an administrator may forbid, or says to be older."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
from pyspark.sql.connect import proto

SERVICE = "spark.connect.SparkConnectService"
STREAMS = {"ExecutePlan", "ReattachExecute"}
UPLOADS = {"AddArtifacts"}

Forbids = Callable[[str, bytes], bool]


def artifacts(method: str, request: bytes) -> bool:
    return method == "AddArtifacts"


def java_functions(method: str, request: bytes) -> bool:
    return method == "ExecutePlan" and proto.ExecutePlanRequest.FromString(
        request
    ).plan.command.register_function.HasField("java_udf")


def nothing(method: str, request: bytes) -> bool:
    return False


class _Line(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, channel: grpc.Channel, forbids: Forbids, version: str | None) -> None:
        self._channel = channel
        self._forbids = forbids
        self._version = version

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method in UPLOADS:
            upload = self._channel.stream_unary(details.method)
            return grpc.stream_unary_rpc_method_handler(
                lambda requests, context: upload(self._allowed_each(method, requests, context))
            )
        if method in STREAMS:
            stream = self._channel.unary_stream(details.method)
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: iter(stream(self._allowed(method, request, context)))
            )
        call = self._channel.unary_unary(details.method)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._aged(method, call(self._allowed(method, request, context)))
        )

    def _allowed(self, method: str, request: bytes, context: Any) -> bytes:
        if self._forbids(method, request):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "forbidden by the administrator")
        return request

    def _allowed_each(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._allowed(method, b"", context)
        yield from requests

    def _aged(self, method: str, answer: bytes) -> bytes:
        if method == "AnalyzePlan" and self._version is not None:
            analyzed = proto.AnalyzePlanResponse.FromString(answer)
            if analyzed.HasField("spark_version"):
                analyzed.spark_version.version = self._version
                return bytes(analyzed.SerializeToString())
        return answer


@contextmanager
def strict(port: int, forbids: Forbids = nothing, version: str | None = None) -> Iterator[str]:
    """The URL of a line to the server at ``port``."""
    with ThreadPoolExecutor(8) as threads, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((_Line(channel, forbids, version),))
        own = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"sc://127.0.0.1:{own}"
        server.stop(None).wait()
