"""From the macro graph to the plan, pass by pass."""
