"""Plan a flow: cost model, workload, and the search for the fastest placement and chunking on given devices."""
