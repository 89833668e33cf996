"""The fork server: a Python that imports what workers need once, and forks a worker for each order."""
