"""What is decided for a whole job: pure code, which hears messages and facts and keeps no clock."""
