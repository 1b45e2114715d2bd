"""`python -m services.fleet` is `penstock`."""

from services.fleet.cli import main

if __name__ == "__main__":
    main()
