"""One file for each launcher: the command, environment and files by which it starts the agents."""
