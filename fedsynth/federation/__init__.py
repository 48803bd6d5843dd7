"""The rounds of a federation: the server, the clients, their messages, and the privacy plan."""
