"""The driver's end of an attempt: the gateway's machine, its valve for outbound events, its intake for inbound ones."""
