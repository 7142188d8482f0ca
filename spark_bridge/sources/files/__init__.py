# SPDX-License-Identifier: Apache-2.0

"""Files as a source, on any filesystem: JSON lines, CSV and Parquet."""

from spark_bridge.common.extras import require

require("pyarrow", "dataframe")
