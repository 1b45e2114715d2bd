"""Operators' work on dead letters: find, show, redrive, discard; each action is recorded in the audit."""
