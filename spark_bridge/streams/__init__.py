# SPDX-License-Identifier: Apache-2.0

"""A source as an input of Structured Streaming: the driver plans micro-batches, and tasks read one of them.

Nothing is loaded here, because executors import this package too.
"""
