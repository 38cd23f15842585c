"""What all parts of the runtime share: the plan, messages, events, and what a call means for an engine."""
