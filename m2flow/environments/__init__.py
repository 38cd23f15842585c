"""Environments: worlds that are acted in, the simulators that step many of them, and small networks that learn in them.

env            `Env`: reset and step; Gymnasium's as one; `Vector`: many side by side, to be gone on with from a record
turns          what a model plays in an episode of an agent: an `Env`, or by turns with others; PettingZoo's environments
openenv        an OpenEnv server's environment
actor_critic   `Simulator` and `ActorCritic`, the roles of a flow
box            what `m2flow.sandbox` runs beside its programs
"""
