"""What tests and benches share: looking at processes, waiting for them, running as somebody else."""
