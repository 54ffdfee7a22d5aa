"""`trinity view`: what a run sampled, as a page in a browser. Reads; changes nothing."""
