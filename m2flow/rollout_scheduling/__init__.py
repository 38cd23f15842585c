"""Schedule rollouts: distributions of lengths, lower bounds on the makespan, and policies that choose which instance runs what."""
