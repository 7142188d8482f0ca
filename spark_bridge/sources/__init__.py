# SPDX-License-Identifier: Apache-2.0

"""Ready sources: each has a half on the driver, which finds splits, and one in the tasks, which reads them.

Nothing is loaded here, because executors import this package too.
"""
