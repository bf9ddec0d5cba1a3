"""The backends: each answers with reasons and runs what it accepts."""
