"""What torchrun's users find when workers fail: error files, the failure summary, typed failures.

Each module is imported by its own name, and only after a worker has failed.
"""
