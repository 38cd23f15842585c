"""The flow language: roles, handles, ops, the tracer and the eager interpreter."""
