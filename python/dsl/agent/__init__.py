"""The one runner: carries a job from its first plan to its outcome, attempt by attempt."""
