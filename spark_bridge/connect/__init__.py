# SPDX-License-Identifier: Apache-2.0

"""The sidecar of a Spark Connect client, in the client's own process.

The client has no JVM. The server's JVM and the tasks dial the client: the relay travels to the server as a small jar,
and the executor's half as an archive, both as artifacts of the client's session.
"""
