# SPDX-License-Identifier: Apache-2.0

"""Kafka as a source."""

from spark_bridge.common.extras import require

require("confluent_kafka", "kafka")
require("pyarrow", "dataframe")
