"""One file for each family of launchers: the command, environment and files by which it starts the agents."""
