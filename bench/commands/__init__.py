"""The commands of `dormouse bench`, by what they look at; each `register` adds its own. Heavy imports are inside."""
