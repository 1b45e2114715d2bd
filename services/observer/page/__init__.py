"""The observer's page: static files, a view model, and a stream of it."""
