# SPDX-License-Identifier: Apache-2.0

"""The implementation of ``make release``; see ``tests.release.__main__``."""
