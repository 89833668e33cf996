"""The connection between the head of a job on several hosts and the agents on them."""
