"""Engines execute the calls of roles: the contract, the registry, and a package for each family of engines."""
