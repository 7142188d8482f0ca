# SPDX-License-Identifier: Apache-2.0

"""A queue of work that tasks empty, and to which they add what they find."""
