"""What a person who runs a benchmark can mend."""


class BenchFailed(Exception):
    """No figure came of it; the text says why."""
