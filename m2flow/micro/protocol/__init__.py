"""What every part of the runtime speaks: the plan, messages, events, and what a call means for an engine."""
