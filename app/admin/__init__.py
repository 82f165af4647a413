"""What the server shows of itself to who runs it."""
