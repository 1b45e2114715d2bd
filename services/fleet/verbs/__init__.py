"""The commands of the command line. Each reads its flags, calls the code that does the work, and prints the result."""
