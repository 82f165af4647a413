def register(cli): pass
