"""What is named elsewhere: hosts in hostfiles and by schedulers, and the variables that go to other hosts."""
