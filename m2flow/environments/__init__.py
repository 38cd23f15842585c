"""Environments: worlds that are acted in, the simulators that step many of them, and small networks that learn in them.

env            `Env`: reset and step; Gymnasium's as one; `Vector`: many side by side, to be gone on with from a record
actor_critic   `Simulator` and `ActorCritic`, the roles of a flow
box            what `m2flow.sandbox` runs beside its programs
"""
