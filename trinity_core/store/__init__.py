"""The durable queue of experiences between explorers and trainer."""
