"""Accelerators of a node: which there are, how many, what a process sees of them, where they sit."""
