"""Run: the driver, its stages and their attempts, and what is checked before a start."""
