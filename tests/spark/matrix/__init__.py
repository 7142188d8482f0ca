# SPDX-License-Identifier: Apache-2.0

"""Files and tables that other tools write, and that they read: each value arrives as it was, or is refused."""
