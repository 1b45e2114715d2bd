"""What every service's process has: settings, start, stop, a management port and a watch over its progress."""
