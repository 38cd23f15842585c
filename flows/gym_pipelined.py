"""PPO in an environment of Gymnasium by three roles: a simulator steps some lanes of environments while an actor infers for the others.

The result is that of `flows/gym_ppo.py`, to the bit. That one acts within the simulator and sends less; this one is for slow environments
and large networks: `functions: {roles: {actor: 1, simulator: 4}}` in the cluster spec gives both processes of their own.
"""

from m2flow import AdamW, flow, log, steps
from m2flow.environments.actor_critic import Actor, ActorCritic, Simulator, episode_return, lanes


@flow
def gym_pipelined(
    task: str = "CartPole-v1", num_steps: int = 100, num_lanes: int = 4, count: int = 4, horizon: int = 64, lr: float = 1e-3
) -> None:
    simulator, actor = Simulator(task, count=count, seed=1), Actor(task)
    learner = ActorCritic(task, optimizer=AdamW(lr, max_grad_norm=0.5))
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    for _ in steps(num_steps):
        for _ in range(horizon):
            acted = actor.act(played, learned)
            played = simulator.step(played, acted)
        played = simulator.collect(played)
        learned = learner.learn(learned, played)
        log(episode_return=episode_return(played))
