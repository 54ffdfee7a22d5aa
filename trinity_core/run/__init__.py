"""Run: the driver, its stages and their attempts, what is checked before and audited after."""
