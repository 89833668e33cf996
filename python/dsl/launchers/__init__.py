"""One file a launcher: how it is asked to start an agent on every host, as argv, environment and files."""
