"""Where the output of each worker goes, and which worker reads stdin."""
