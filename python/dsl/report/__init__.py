"""What the user is told: the plan, what happens, how it ended and why."""
