"""The records of a run, which it is resumed from: ledger, segment files, journal, checkpoints."""
