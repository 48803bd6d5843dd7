"""The round loop: server, clients in one process, messages, and the plan of a budget."""
