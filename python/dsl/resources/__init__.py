"""Which hosts and slots take part: hostfiles, filters, ranks over nodes."""
