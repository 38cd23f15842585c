"""First come, first served: a slot that is free takes the next sample, on the instance with the fewest first.

Source: Orca (OSDI 2022) and vLLM (arXiv 2309.06180, 4.5) serve requests in this order.
"""

from __future__ import annotations

from m2flow.micro.rollouts.policy import Policy


class FirstCome(Policy):
    """Has no opinion, and so leaves everything to the order in which samples were asked for."""

    name = "first-come-first-served"
