# SPDX-License-Identifier: Apache-2.0

"""The task's end of an attempt: the subtask's machine, with its outbound and its inbound half."""
