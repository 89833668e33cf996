"""Runs a job, attempt by attempt, from its first plan to its outcome."""
