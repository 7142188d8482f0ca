"""Tests of coordinators and operators with ``headgate.testing``: without Spark, in virtual time."""
