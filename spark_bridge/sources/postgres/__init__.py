# SPDX-License-Identifier: Apache-2.0

"""A PostgreSQL table as a source, and its changes."""

from spark_bridge.common.extras import require

require("psycopg", "postgres")
require("pyarrow", "dataframe")
