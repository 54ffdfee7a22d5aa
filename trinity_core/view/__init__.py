"""`trinity view`: a run's samples as a page in a browser. Read-only."""
