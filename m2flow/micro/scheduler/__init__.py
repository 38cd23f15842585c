"""The scheduler: a pure state machine, events in and commands out."""
