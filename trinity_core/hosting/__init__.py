"""Hosting: Ray, placement, GPUs, and the actors of a run with their faults."""
