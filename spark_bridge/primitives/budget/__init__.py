# SPDX-License-Identifier: Apache-2.0

"""An amount, such as money, that all tasks together may spend once."""
