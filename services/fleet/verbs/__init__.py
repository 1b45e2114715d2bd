"""The verbs of the command line: each reads its flags, calls what does the work, prints."""
