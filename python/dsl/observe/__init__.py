"""Views into running jobs: which ones there are, what their workers do, and what that means."""
