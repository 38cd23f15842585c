"""Every option of what a flow may call is checked where it is made, at the line of the flow; introspection finds new ones."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import m2flow
from m2flow import (
    SGD,
    AdamW,
    AdamW8bit,
    Balance,
    Best,
    Chat,
    Correction,
    Critic,
    Dataset,
    Lora,
    Loss,
    Muon,
    PerSequence,
    Policy,
    Reference,
    Reward,
    RewardModel,
    Role,
    Rows,
    Sample,
    Sampling,
    Sandbox,
    WeightGroup,
    agent,
    best_and_worst,
    by_conversation,
    call,
    clipped_value,
    concat,
    distill,
    distill_top_k,
    evaluate,
    flow,
    gae,
    gigpo,
    join,
    load_flow,
    loss,
    nll,
    op,
    pass_at_k,
    pass_rate_between,
    ppo_clip,
    reinforce,
    steps,
    tool,
    where,
)
from m2flow.errors import M2FlowError, OptionError
from m2flow.macro.loss_declarations import LOSSES
from m2flow.macro.tracing import TracingBackend, run_traced

BAD: list[object] = [math.nan, math.inf, -math.inf, -1, -0.5, 2.5, True, 3, None, "no such", "", b"no", ("no",), [-1], {"no": 1}, object()]
BAD += [10**30, 10**400, (True, True)]
"""What an option might be given by mistake. What of it is legal for which option says `LEGAL`; the rest must be refused."""

ROWS = [{"prompt": f"{i}=", "target": "1"} for i in range(4)]


def judge(sample: Sample) -> float:
    return 1.0


class Judge(Role):
    @call()
    def grade(self, sample: Sample) -> float:
        return 1.0


async def solving(chat: Chat, row: Sample) -> float:
    return 1.0


solver = agent(solving)


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def agent_of(**options: object) -> object:
    return agent(**options)(solving)  # type: ignore[call-overload]


def tool_of(**options: object) -> object:
    return tool(**options)(double)  # type: ignore[call-overload]


class World:
    """What the calls of a flow need of the lines before; a line stands in the flow when it is first needed."""

    @functools.cached_property
    def policy(self) -> Policy:
        return Policy("fake")

    @functools.cached_property
    def reward(self) -> Reward:
        return Reward(judge)

    @functools.cached_property
    def reference(self) -> Reference:
        return Reference(self.policy)

    @functools.cached_property
    def critic(self) -> Critic:
        return Critic(self.policy)

    @functools.cached_property
    def model(self) -> RewardModel:
        return RewardModel("fake")

    @functools.cached_property
    def dataset(self) -> Dataset:
        return Dataset(ROWS)

    @functools.cached_property
    def responses(self) -> Rows:
        return self.policy.generate(self.dataset.take(2), n=2, max_new_tokens=4)

    @functools.cached_property
    def rewards(self) -> Rows:
        return self.reward.score(self.responses)

    @functools.cached_property
    def values(self) -> Rows:
        return self.critic.values(self.responses)


Options = dict[str, object]
Valid = Callable[[World], tuple[Callable[..., object], Options]]


def generate(world: World, **options: object) -> tuple[Callable[..., object], Options]:
    return world.policy.generate, {"max_new_tokens": 4, **options}


def seldom_seen(row: dict[str, object], seen: object) -> float:
    return 1.0


def observe(world: World) -> tuple[Callable[..., object], Options]:
    rows = Dataset(ROWS, name="observed", curriculum=seldom_seen)
    responses = world.policy.generate(rows.take(2), max_new_tokens=4)
    return rows.observe, {"responses": responses, "values": world.reward.score(responses)}


REDUCTIONS = ("mean", "sum", "min", "max", "std", "any", "all", "count")

VALID: dict[str, list[Valid]] = {
    "AdamW8bit": [lambda w: (AdamW8bit, {})],
    "AdamW": [lambda w: (AdamW, {}), lambda w: (AdamW, {"schedule": "cosine", "total_steps": 4})],
    "Muon": [lambda w: (Muon, {})],
    "SGD": [lambda w: (SGD, {"momentum": 0.5})],
    "Balance": [lambda w: (Balance, {"loss": 1e-3})],
    "Lora": [lambda w: (Lora, {})],
    "WeightGroup": [lambda w: (WeightGroup, {"names": "*norm*"})],
    "Loss": [lambda w: (Loss, {"name": "mine", "function": "m:f", "needs": ("logprobs",)})],
    "Sampling": [lambda w: (Sampling, {"max_new_tokens": 4})],
    "Policy": [lambda w: (Policy, {"model": "fake", "name": "other"})],
    "Policy.generate": [
        lambda w: generate(w, prompts=w.dataset.take(2)),
        lambda w: generate(w, prompts=w.dataset, count=2, score=w.reward, n=2),
        lambda w: generate(w, prompts=w.dataset.take(2), oversample=1.5, late="drop", timeout_s=3.0),
    ],
    "Policy.update": [lambda w: (w.policy.update, {"responses": w.responses, "rewards": w.rewards})],
    "Policy.logprobs": [lambda w: (w.policy.logprobs, {"responses": w.responses})],
    "Critic": [lambda w: (Critic, {"model": "fake", "name": "other"})],
    "Critic.values": [lambda w: (w.critic.values, {"responses": w.responses})],
    "Critic.score": [lambda w: (w.critic.score, {"responses": w.responses})],
    "Critic.update": [
        lambda w: (w.critic.update, {"responses": w.responses, "returns": w.rewards}),
        lambda w: (w.critic.update, {"responses": w.responses, "returns": w.rewards, "old_values": w.values}),
    ],
    "Reference": [lambda w: (Reference, {"model": "fake", "name": "other"})],
    "Reference.follow": [lambda w: (w.reference.follow, {"share": 0.5})],
    "Reference.logprobs": [lambda w: (w.reference.logprobs, {"responses": w.responses})],
    "Reward": [lambda w: (Reward, {"function": judge, "name": "other"})],
    "Reward.score": [lambda w: (w.reward.score, {"responses": w.responses})],
    "Reward.sum": [lambda w: (Reward.sum, {"parts": {judge: 1.0}, "name": "other"})],
    "evaluate": [lambda w: (evaluate, {"policy": w.policy, "dataset": w.dataset, "score": w.reward, "max_new_tokens": 4})],
    "Best": [lambda w: (Best, {"policy": w.policy})],
    "Best.stop": [lambda w: (Best(w.policy).stop, {"value": 0.5})],
    "RewardModel": [lambda w: (RewardModel, {"model": "fake", "name": "other"})],
    "RewardModel.score": [lambda w: (w.model.score, {"responses": w.responses})],
    "Role": [lambda w: (Judge, {})],
    "Dataset": [lambda w: (Dataset, {"rows": ROWS})],
    "Dataset.generate": [lambda w: (Dataset.generate, {"make": lambda rng: ROWS[0], "size": 2})],
    "Dataset.take": [lambda w: (w.dataset.take, {"count": 2})],
    "Dataset.upto": [lambda w: (w.dataset.upto, {"count": 2})],
    "Dataset.batches": [lambda w: (lambda **options: next(Dataset(ROWS).batches(**options)), {"size": 2})],
    "Dataset.split": [lambda w: (w.dataset.split, {"heldout": 2})],
    "Dataset.shard": [lambda w: (w.dataset.shard, {"index": 1, "count": 3})],
    "Dataset.mix": [lambda w: (Dataset.mix, {"datasets": [w.dataset]})],
    "Dataset.observe": [observe],
    "Dataset.all": [lambda w: (w.dataset.all, {})],
    **{f"Rows.{how}": [lambda w, how=how: (getattr(w.rewards, how), {})] for how in REDUCTIONS},  # type: ignore[misc]
    "Rows.map": [lambda w: (w.responses.map, {"function": judge})],
    "Rows.filter": [lambda w: (w.responses.filter, {"keeps": judge})],
    "Rows.filter_groups": [lambda w: (w.responses.filter_groups, {"keeps": len})],
    "Rows.select": [lambda w: (w.responses.select, {"condition": w.rewards > 0})],
    "Rows.groupby": [lambda w: (w.responses.groupby, {"key": "target"})],
    "Rows.back_to": [lambda w: (w.rewards.back_to, {"prompts": w.dataset.take(1)})],
    "Metrics.lagged": [lambda w: (w.policy.update(w.responses, w.rewards).lagged, {"steps": 0})],
    "call": [lambda w: (lambda **options: call(**options)(judge), {})],
    "op": [lambda w: (lambda **options: op(**options)(judge), {}), lambda w: (op, {"granularity": "minibatch", "size": 2})],
    "clipped_value": [lambda w: (clipped_value, {})],
    "distill": [lambda w: (distill, {})],
    "distill_top_k": [lambda w: (distill_top_k, {})],
    "nll": [lambda w: (nll, {})],
    "gigpo": [lambda w: (gigpo, {})],
    "by_conversation": [lambda w: (by_conversation, {})],
    "pass_at_k": [lambda w: (pass_at_k, {"k": 2})],
    "pass_rate_between": [lambda w: (pass_rate_between, {"low": 0.25, "high": 0.75})],
    "ppo_clip": [lambda w: (ppo_clip, {}), lambda w: (ppo_clip, {"kl_coef": 0.1})],
    "reinforce": [lambda w: (reinforce, {})],
    "Correction": [lambda w: (Correction, {})],
    "PerSequence": [lambda w: (PerSequence, {"tokens": 512})],
    "loss": [lambda w: (loss, {"needs": ["logprobs"]})],
    "flow": [lambda w: (lambda **options: flow(**options)(judge), {})],
    "gae": [lambda w: (gae, {"responses": w.responses, "rewards": w.rewards, "values": w.values})],
    "best_and_worst": [lambda w: (best_and_worst, {"responses": w.responses, "rewards": w.rewards})],
    "Dataset.pairs": [lambda w: (Dataset([{"prompt": "1=", "chosen": "1", "rejected": "2"}]).pairs, {})],
    "load_flow": [lambda w: (load_flow, {"target": __file__})],
    "steps": [lambda w: (lambda **options: list(steps(**options)), {"count": 1})],
    "where": [lambda w: (where, {"condition": w.rewards > 0, "first": w.rewards, "second": 0.0})],
    "concat": [lambda w: (concat, {})],
    "join": [lambda w: (join, {"first": w.responses})],
    "agent": [lambda w: (agent_of, {})],
    "tool": [lambda w: (tool_of, {})],
    "Policy.rollout": [lambda w: (w.policy.rollout, {"agent": solver, "prompts": w.dataset.take(2), "max_tokens": 8})],
    "EpisodeRows.branch": [lambda w: (w.policy.rollout(solver, w.dataset.take(2), max_tokens=8).branch, {"n": 2})],
    "Sandbox": [lambda w: (Sandbox, {})],
}
VALID |= {name: [lambda w, name=name: (getattr(m2flow, name), {})] for name in sorted(LOSSES) if name not in VALID}  # type: ignore[misc]
"""What a flow may call -> valid calls of it, in which one option after the other is replaced."""

OTHERS = {
    "run, plan, simulate, open_run, Run, Run.samples, Run.metrics, Run.steps": "around flows: tests/runs/test_python_entrance.py",
    "Run.spans, Run.policy, Run.tokenizer, Run.compare": "likewise",
    "Run.rescore": "around flows: tests/cli/test_rescore.py",
    "Chat, Chat.say, Chat.reply, Chat.run, Turn, ToolCall, ToolCall.message": "of agents while they run: tests/agents",
    "Chat.conversation, Chat.beside, Chat.fork, Chat.num_prompt_tokens, Chat.texts_of": "likewise",
    "EpisodeFailed, EpisodeFailed.add_note, EpisodeFailed.with_traceback": "an exception",
    "endpoint": "of an open episode: tests/agents/test_http_sessions.py",
    "mcp_tools": "needs a server: tests/agents/test_mcp_tools.py",
    "Sandbox.run, Sandbox.shell, Sandbox.read, Sandbox.write, Sandbox.snapshot, Sandbox.restore, Sandbox.probe": "of an open box",
    "Batch, Counts, Finish, Metrics, Number, Rows, Sample, SampleId, Scores": "what calls give; a flow makes none",
    "Flow": "made by @flow",
    "informative": "a function for keep=, called on samples",
    "sequence_mean, sequence_sum": "functions on tensors, for losses",
    "log": "any name, with a number: tests/macro/test_flow.py",
    "traceparent": "has no option",
    "AdamW.rate, AdamW.in_loop, AdamW8bit.rate, AdamW8bit.in_loop, Muon.rate, Muon.in_loop, SGD.rate, SGD.in_loop": "ours",
    "Dataset.return_rest": "of a refill",
    "Dataset.within": "needs a tokenizer: tests/engines/models/test_prompt_limits.py",
    "Dataset.jsonl, Dataset.csv, Dataset.parquet, Dataset.hf, Dataset.reasoning_gym": "need files: tests/macro/test_dataset_files.py",
    "EpisodeRows, EpisodeRows.of": "what a rollout gives: tests/agents/test_speakers.py",
    "Reward.judge": "ours",
    "Rows.batch, Rows.with_columns, Rows.within, Metrics.items": "have no option, or handles alone",
    "Rows.check, Rows.like, Rows.mask, Rows.metrics_of, Rows.observe, Rows.operand, Rows.operate, Rows.reduce, Rows.result_of": "ours",
    "Rows.samples_of, Metrics.check, Metrics.observe, Metrics.operand, Metrics.result_of": "ours",
}
"""What else is public, and why it is not tried."""

Legal = tuple[str, Callable[[object], bool]]
ANY_NUMBER = (int, float)


def is_number_in(low: float, high: float = math.inf) -> Callable[[object], bool]:
    return lambda value: isinstance(value, ANY_NUMBER) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)


def is_count(value: object) -> bool:
    return value == 3 and not isinstance(value, bool)


def is_turn(value: object) -> bool:
    return value in (-1, 3) and not isinstance(value, bool)


def is_any(value: object) -> bool:
    return True


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def is_list_of_names(value: object) -> bool:
    return value == ("no",) or value == {"no": 1}


def either(*tests: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: any(test(value) for test in tests)


def is_none(value: object) -> bool:
    return value is None


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


LEGAL: dict[str, Callable[[object], bool]] = {
    "*.lr": is_number_in(0),
    "*.eps": is_number_in(1e-37),
    "*.weight_decay": is_number_in(0),
    "*.max_grad_norm": is_number_in(0),
    "*.warmup_steps": is_count,
    "*.total_steps": is_count,
    "*.steps_of": is_none,
    "*.momentum": is_number_in(0, 1 - 2**-24),
    "*.log_layers": is_flag,
    "*.at": either(is_none, is_count),
    "Lora.rank": is_count,
    "WeightGroup.names": is_text,
    "WeightGroup.lr_scale": is_number_in(0),
    "WeightGroup.weight_decay": either(is_none, is_number_in(0)),
    "Lora.alpha": is_number_in(1e-9),
    "Lora.targets": either(is_text, is_list_of_names, lambda value: value == ""),
    "Loss.name": is_text,
    "Loss.function": lambda value: isinstance(value, str),
    "Loss.needs": is_list_of_names,
    "Sampling.max_new_tokens": is_count,
    "Sampling.temperature": is_number_in(1e-3, 1e3),
    "Sampling.top_k": is_count,
    "Sampling.min_new_tokens": is_count,
    "*.policy": is_none,
    "Dataset.curriculum": is_none,
    "Dataset.generate.curriculum": is_none,
    "*.max_prompt_tokens": is_none,
    "Policy.system": either(is_none, is_text),
    "Policy.chat_template": either(is_none, is_text),
    "Policy.chat_template_kwargs": either(is_none, lambda value: value == {"no": 1}),
    "Policy.tools": is_none,
    "*.stop": either(is_text, lambda value: value == ("no",)),
    "Sampling.stop": lambda value: value == ("no",),
    "*.include_stop": is_flag,
    "*.regex": either(is_text, lambda value: value == ""),
    "*.grammar": either(is_text, lambda value: value == ""),
    "*.temperature_of": either(is_text, lambda value: value == ""),
    "*.json_schema": lambda value: value in ("", {"no": 1}),
    "*.ignore_eos": is_flag,
    "*.sampling_mask": is_flag,
    "*.min_p": is_number_in(0, 1),
    "*.repetition_penalty": is_number_in(1e-2, 1e2),
    "Policy.generate.logit_bias": is_none,
    "*.name": is_text,
    "Reward.name": either(is_none, is_text),
    "Role.name": either(is_none, is_text),
    "*.model": is_text,
    "*.chat": is_flag,
    "*.lora": is_none,
    "*.optimizer": is_none,
    "*.rollout_dtype": is_none,
    "*.loss": is_none,
    "*.minibatch_size": either(is_none, is_count),
    "*.epochs": is_count,
    "*.timeout_s": either(is_none, is_number_in(1e-9)),
    "*.isolated": either(is_none, is_flag),
    "call.isolated": is_flag,
    "gigpo.discount": is_number_in(0, 1),
    "gigpo.weight": is_number_in(0),
    "pass_at_k.k": is_count,
    "pass_rate_between.low": is_number_in(0, 1),
    "pass_rate_between.high": is_number_in(0, 1),
    "pass_rate_between.right": is_number_in(-1e300, 1e300),
    "gae.critic_lam": either(is_none, is_number_in(0, 1)),
    "gae.length_alpha": is_number_in(0),
    "op.per_sample": lambda value: value is False,
    "Reward.sum.on_error": either(is_number_in(-1e30, 1e30), lambda value: value == "raise"),
    "*.revision": either(is_none, is_text),
    "*.replay_routing": is_none,
    "Policy.balance": is_none,
    "Balance.loss": is_number_in(0),
    "Balance.z_loss": is_number_in(0),
    "Balance.bias_step": is_number_in(0),
    "evaluate.n": is_count,
    "evaluate.max_new_tokens": is_count,
    "evaluate.right": is_number_in(-1e300, 1e300),
    "evaluate.answer": is_none,
    "Best.patience": either(is_none, is_count),
    "Best.keep": is_flag,
    "Best.least": is_number_in(0),
    "Best.stop.value": is_number_in(-1e300, 1e300),
    "Dataset.split.heldout": is_count,
    "Dataset.split.seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "Dataset.shard.count": is_count,
    "Dataset.mix.weights": is_none,
    "Reward.on_error": either(is_number_in(-1e30, 1e30), lambda value: value == "raise"),
    "*.over": is_none,
    "*.reads": is_list_of_names,
    "*.writes": is_list_of_names,
    "*.clip": is_number_in(0),
    "bradley_terry.center": is_number_in(0),
    "clip_cov.cov_low": is_number_in(0),
    "clip_cov.cov_high": is_number_in(0),
    "kl_cov.kl_coef": is_number_in(0),
    "Policy.generate.n": is_count,
    "agent.tool_calls": is_none,
    "tool.max_chars": is_count,
    "tool.slots": either(is_none, is_count),
    "tool.name": either(is_text, lambda value: value == ""),
    "EpisodeRows.branch.n": is_count,
    "EpisodeRows.branch.at": is_turn,
    "Policy.rollout.n": is_count,
    "Policy.rollout.max_tokens": is_count,
    "Policy.rollout.max_turns": is_count,
    "Policy.rollout.max_conversations": is_count,
    "Policy.rollout.turn_timeout_s": either(is_none, is_number_in(1e-9)),
    "Policy.rollout.temperature": is_number_in(1e-3, 1e3),
    "Policy.rollout.top_k": is_count,
    "Policy.rollout.speakers": is_none,
    "Policy.rollout.staleness": is_none,
    "Policy.generate.max_new_tokens": is_count,
    "Policy.generate.temperature": is_number_in(1e-3, 1e3),
    "Policy.generate.top_k": is_count,
    "Policy.logprobs.top_k": either(is_none, is_count),
    "Reference.logprobs.top_k": either(is_none, is_count),
    "Policy.generate.min_new_tokens": is_count,
    "Policy.generate.count": either(is_none, is_count),
    "Policy.generate.max_draws": either(is_none, is_count),
    "Policy.generate.score": is_none,
    "Policy.generate.keep": is_none,
    "Policy.generate.staleness": is_none,
    "Policy.generate.oversample": is_number_in(1),
    "Policy.update.rewards": is_none,
    "Policy.update.reference": is_none,
    "*.columns": is_none,
    "Policy.update.allow_unsound": is_flag,
    "Critic.update.old_values": is_none,
    "Dataset.shuffle": is_flag,
    "Dataset.generate.shuffle": is_flag,
    "Dataset.generate.size": is_count,
    "Dataset.generate.seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "Dataset.take.count": is_count,
    "Dataset.upto.count": is_count,
    "Dataset.batches.size": is_count,
    "Dataset.observe.lag": is_count,
    "Metrics.lagged.steps": is_count,
    "call.size": either(is_none, is_count),
    "call.returns": is_list_of_names,
    "op.size": either(is_none, is_count),
    "*.eps_high": is_number_in(0),
    "*.eps_low": is_number_in(0, 1),
    "*.beta": is_number_in(1e-9),
    "*.desirable_weight": is_number_in(0),
    "*.undesirable_weight": is_number_in(0),
    "simpo.gamma": is_number_in(0),
    "ipo.average": is_flag,
    "*.log_eps_low": is_number_in(0),
    "*.log_eps_high": is_number_in(0),
    "*.max_ratio": is_number_in(1e-9),
    "*.max_weight": is_number_in(1e-9),
    "*.tau": is_number_in(0),
    "*.tau_positive": is_number_in(1e-9),
    "*.tau_negative": is_number_in(1e-9),
    "*.most": is_number_in(0),
    "*.entropy_coef": is_number_in(0),
    "*.correction": is_none,
    "Correction.upper": is_number_in(1e-9),
    "Correction.lower": is_number_in(0, 2),
    "Correction.veto": is_number_in(0, 1),
    "PerSequence.tokens": is_number_in(1e-9),
    "ppo_clip.kl_coef": is_number_in(0),
    "ppo_clip.dual_clip": is_number_in(1.001),
    "loss.needs": is_list_of_names,
    "flow.staleness": is_count,
    "gae.kl": is_none,
    "steps.count": is_count,
    "where.condition": is_any,  # A plain value, which is true or not.
    "where.first": is_any,
    "where.second": is_any,
}
"""What of `BAD` an option takes; `*.name`: that option of anything."""


def public() -> Iterator[tuple[str, Callable[..., object]]]:
    for name in m2flow.__all__:
        found = getattr(m2flow, name)
        yield name, found
        if inspect.isclass(found) and name not in ("Batch", "Finish", "Flow", "Number", "Sample", "SampleId", "Scores", "Role"):
            of_rows = dir(m2flow.Rows) if name == "EpisodeRows" else ()
            for method, function in inspect.getmembers(found, callable):
                if not method.startswith("_") and method not in of_rows:
                    yield f"{name}.{method}", function


def options_of(name: str) -> list[str]:
    function = dict(public())[name]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [key for key, parameter in inspect.signature(function).parameters.items() if key != "self" and parameter.kind not in kinds]


CASES = [(name, which, option) for name, calls in VALID.items() for which in range(len(calls)) for option in options_of(name)]


def test_whatever_a_flow_can_call_is_tried_here_or_says_why_not() -> None:
    others = {name for names in OTHERS for name in names.split(", ")}
    assert {name for name, _ in public()} == set(VALID) | others


def outcome(name: str, which: int, option: str | None, value: object) -> M2FlowError | None:
    """What a flow with this call ends with."""

    @flow
    def trying() -> None:
        function, valid = VALID[name][which](World())
        function(**(valid if option is None else {**valid, option: value}))

    try:
        run_traced(trying, {}, TracingBackend(), steps=1, seed=0)
    except M2FlowError as error:
        return error
    return None


@pytest.mark.parametrize("name", VALID)
def test_the_calls_that_are_tried_are_valid(name: str) -> None:
    if name not in ("load_flow", "concat", "Rows.back_to"):
        assert [outcome(name, which, None, None) for which in range(len(VALID[name]))] == [None] * len(VALID[name])


@pytest.mark.parametrize(("name", "which", "option"), CASES)
def test_an_option_takes_no_value_that_it_can_not_mean(name: str, which: int, option: str) -> None:
    is_legal = LEGAL.get(f"{name}.{option}") or LEGAL.get(f"*.{option}") or (lambda value: False)
    for value in BAD:
        error = outcome(name, which, option, value)
        if error is None:
            assert is_legal(value), f"{name}({option}={value!r}) is accepted"
        else:
            assert f"{Path(__file__).name}:" in error.where, error
            assert not isinstance(error, OptionError) or option in str(error) or name.rpartition(".")[2] in str(error), error


def test_a_choice_that_is_none_is_told_the_nearest() -> None:
    for name, option, value, nearest in (
        ("AdamW", "schedule", "cosin", "cosine"),
        ("Policy", "dtype", "bf16loat", "bfloat16"),
        ("Policy", "init", "randomm", "random"),
        ("Policy.update", "advantages", "dr_grp", "dr_grpo"),
        ("Policy.generate", "late", "dropp", "drop"),
        ("ppo_clip", "denominator", "sequence", "sequences"),
        ("dppo", "divergence", "tvv", "tv"),
        ("op", "granularity", "samples", "sample"),
        ("Rows.mean", "over", "groups", "group"),
        ("call", "returns", "rewards", "reward"),
    ):
        error = outcome(name, 0, option, value)
        assert isinstance(error, M2FlowError)
        assert f"Did you mean {nearest!r}?" in error.now, error
