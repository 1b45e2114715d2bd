"""Checks a pipe file, shows its effects on stored events, creates its topics, and tries its transforms."""
