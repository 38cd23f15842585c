"""Which instance generates which sample, and when: lengths, lower bounds, scheduling policies."""
