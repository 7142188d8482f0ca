# SPDX-License-Identifier: Apache-2.0

"""Redis Streams as a source."""

from spark_bridge.common.extras import require

require("redis", "redis")
require("pyarrow", "dataframe")
