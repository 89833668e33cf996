"""The fork server: a Python that imports once what workers need, and forks a worker for each order."""
