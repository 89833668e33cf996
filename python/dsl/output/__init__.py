"""Where the output of each worker goes, and who reads stdin."""
