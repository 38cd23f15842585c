"""Lower the macro graph of a flow to a plan for worker processes, pass by pass."""
