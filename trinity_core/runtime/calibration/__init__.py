"""Seconds a step on this machine, from a short real run that is kept for the next plan. See docs/flows.md."""
