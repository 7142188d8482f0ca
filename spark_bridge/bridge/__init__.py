"""From Spark to the coordinators: listener facts in, kills and cancellations out."""
