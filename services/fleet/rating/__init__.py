"""What one instance of a service takes on this machine."""
