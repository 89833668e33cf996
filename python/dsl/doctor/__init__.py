"""The doctor of ``--doctor``: what would go wrong with a job on its hosts, before anything is started."""
