"""Runs `penstock` as `python -m services.fleet`."""

from services.fleet.cli import main

if __name__ == "__main__":
    main()
