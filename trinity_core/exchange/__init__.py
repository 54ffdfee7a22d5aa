"""Exchange: where explorer and trainer meet: store, weight sync, checkpoints and tracking."""
