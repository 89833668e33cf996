"""How the nodes of a job meet, attempt by attempt."""
