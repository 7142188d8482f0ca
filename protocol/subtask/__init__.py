"""The task's end of an attempt: the subtask's machine, its valve for outbound events, its intake for inbound ones."""
