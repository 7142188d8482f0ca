# SPDX-License-Identifier: Apache-2.0

"""The protocol of Headgate as pure state machines: no event loop, socket, clock, randomness or logging."""
