"""The flow language: roles, handles, ops, the tracer that records them, and the eager interpreter."""
