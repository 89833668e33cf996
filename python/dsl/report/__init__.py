"""What we tell the user: the plan, what happens, and how and why the job ended."""
