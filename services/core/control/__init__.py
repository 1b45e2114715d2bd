"""The decisions for the whole fleet in `penstock.control`. `topic` reads them; each kind of decision has a module."""
