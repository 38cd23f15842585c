"""What a run writes down and goes on from: ledger, segments, journal, checkpoints."""
