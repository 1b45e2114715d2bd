"""HTTP for all services: addresses, listening, refusals, the files of a page; and the guarded client of destinations."""
