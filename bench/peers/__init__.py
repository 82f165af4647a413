"""Us and what a user would pick instead, alternating on one machine with the same weights: `dormouse bench peers`.

recipes     how each server is started
lines       what is measured, and the project's bars
against     takes the samples, one server after the other, round after round
tables      how they look
"""
