"""Sessions and the bytes of their KV caches; knows no HTTP and no transformers."""
