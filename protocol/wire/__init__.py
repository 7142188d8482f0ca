# SPDX-License-Identifier: Apache-2.0

"""The wire between driver and task: messages, their encoding, frames, the handshake, and the checkpoint format."""
