"""Scenarios: real processes, real sockets, real kills; what a client gets and what is left are checked."""
