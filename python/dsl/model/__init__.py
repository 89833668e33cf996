"""The data that flows from the command line to the exit code: `Request` -> `Job` -> `NodePlan` -> `Outcome`.

All of it is frozen, and none of it touches the machine: records hold text, numbers, tuples, mappings and
other records, so that a request can be compared and a job can be written to bytes and read back.
"""
