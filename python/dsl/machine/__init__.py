"""This machine: CPUs, ports, console, names, files. Plans ask for them through `dsl.facts`."""
