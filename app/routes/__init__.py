"""One noun a file: the routes of the gateway."""
