"""Test engines, channels and schedules: conformance suites for public use, fake engines, random programs, and a cluster in one thread."""
