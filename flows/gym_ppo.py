"""PPO in an environment of Gymnasium: a simulator plays with the actor's weights, and a learner trains actor and critic on what it played.

CartPole's episodes end at 500 steps, each with reward 1, so a return of 500 is the best there is. With `--behind` the simulator plays with
the weights of the step before, while the learner makes the next: both are busy, and the ratio of PPO accounts for it.
"""

from m2flow import AdamW, flow, log, steps
from m2flow.environments.actor_critic import ActorCritic, Simulator, episode_return, lanes


@flow
def gym_ppo(
    task: str = "CartPole-v1",
    num_steps: int = 100,
    num_lanes: int = 2,
    count: int = 8,
    horizon: int = 64,
    lr: float = 1e-3,
    behind: bool = False,
) -> None:
    simulator = Simulator(task, count=count, seed=1)
    learner = ActorCritic(task, optimizer=AdamW(lr, max_grad_norm=0.5))
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    past = learned
    for _ in steps(num_steps):
        played = simulator.play(played, past if behind else learned, horizon=horizon)
        past, learned = learned, learner.learn(learned, played)
        log(episode_return=episode_return(played))
