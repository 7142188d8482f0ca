# SPDX-License-Identifier: Apache-2.0

"""The driver's end of an attempt: the gateway's machine, with its outbound and its inbound half."""
