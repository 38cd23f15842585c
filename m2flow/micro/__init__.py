"""The runtime of a plan: protocol, lowering, scheduler, controller, worker, records."""
