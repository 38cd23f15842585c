"""Conformance suites, fakes, and a whole cluster in one thread: public."""
