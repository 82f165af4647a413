"""Tokens in, tokens out; knows no HTTP."""
