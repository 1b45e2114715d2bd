"""The table service, in this process, over the embedded log."""
