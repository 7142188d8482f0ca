"""The TCP server that tasks connect to."""
