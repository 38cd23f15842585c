"""Cost model and placement search: the fastest plan for a flow on given devices, and why."""
