"""The only readers of this machine: CPUs, ports, console, names, files."""
