"""Where blocks lie: one store of equal slots per tier."""
