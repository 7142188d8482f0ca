"""Figures of Headgate, each beside a raw baseline that is measured in the same run."""
