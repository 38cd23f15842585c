"""The parties of a flow: Policy, Reference and Reward, and what each of their calls declares.

A role says what a call reads and writes, on which unit it may be run, and what kind of engine performs it. It knows nothing of
where that engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from m2flow.errors import OptionError, TraceError
from m2flow.macro.datasets import Dataset
from m2flow.macro.deferring import deferring
from m2flow.macro.graph import Granularity, Ref
from m2flow.macro.handles import Handle, Metrics, Rows, Scores, describe
from m2flow.macro.inputs import NUMBERS, PROMPTS, REFERENCE, RESPONSES, REWARDS, ROWS, Passes, Role, check_optimizer
from m2flow.macro.late import carries, check_late, check_line
from m2flow.macro.losses import nll, ppo_clip
from m2flow.macro.refill import Keep, refill
from m2flow.macro.units import is_isolated
from m2flow.recipe import (
    COMPUTED,
    AdamW,
    Lora,
    Loss,
    Model,
    Sampling,
    check_choice,
    check_number,
    check_seconds,
    is_count,
    model_path,
)
from m2flow.samples import MAX_GROUP, Batch, Column, Sample

AdvantageName = Literal["grpo", "grpo_population", "dr_grpo", "rloo"]


_WITH_ADVANTAGES, _WITHOUT = ppo_clip(), nll()
"""What an update minimises that names no loss."""

_NOT_COLUMNS = {"samples", "rewards", "reward", "advantages", "reference", "reference_logprobs", "tokens", "loss_mask"} | COMPUTED
"""What `columns` of an update may not be called: it has another source."""


class Policy(Role):
    """A language model that is sampled from and trained.

    Args:
        model: a Hugging Face model directory, or a .gguf file.
        init: `random` draws the weights instead of loading them; only the config and the tokenizer are read then.
        dtype: of the weights that are trained.
        rollout_dtype: what engines that sample hold them in, by default the same. `bfloat16` halves what they read for a token; each
            sampled token's log-probability is then that of the rounded weights.
        chat: put prompts through the tokenizer's chat template.
        optimizer: for `update` calls that bring none.
        lora: train adapters of low rank, not the weights themselves. Engines that sample get the sum of both.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "policy",
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        chat: bool = False,
        optimizer: AdamW | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__(name, "Policy")
        self.optimizer = AdamW() if optimizer is None else optimizer
        check_optimizer(self.optimizer)
        self._session.add_model(
            name, Model(model_path(model), init, self._session.seed, dtype, chat, rollout_dtype=rollout_dtype, lora=lora)
        )

    def generate(
        self,
        prompts: Handle | Dataset,
        *,
        n: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_new_tokens: int = 0,
        count: int | None = None,
        score: Reward | None = None,
        keep: Keep | None = None,
        max_draws: int | None = None,
        staleness: int | None = None,
        oversample: float = 1.0,
        late: Literal["wait", "drop", "carry", "defer"] = "wait",
        timeout_s: float | None = None,
        kv: Literal["recompute", "keep"] = "recompute",
    ) -> Rows:
        """`n` responses to each prompt, drawn from the weights as they are at this line, or older ones as far as the staleness allows.

        Args:
            prompts: rows to answer; or a dataset, from which prompts are drawn until `count` groups are kept.
            count: groups to keep; rejected ones are replaced while others still run. With `late="defer"`, those that each turn gives.
            score: judges the responses that are drawn this way; `score(responses)` of the result costs nothing more.
            keep: says of a group's samples, which have a `reward`, whether it counts; by default those with different rewards.
            max_draws: most prompts to draw; by default 16 for each group.
            staleness: versions that the weights may be behind; by default the flow's. 0 for an evaluation that must be of these weights.
            oversample: how many times more prompts are given than groups are needed; the first whole groups are the result.
            late: what becomes of the samples of the other groups: `drop` gives them up; `carry` has them go on, from their tokens so far,
                in the next call of this line, which gives them too; `defer` has their prompts answered anew in a turn of their own, once
                `count` of them wait, where all run to their ends. The run records which groups came first.
            timeout_s: with `late="drop"`, seconds that a sample may take from when an engine first has it; else its group is late. So the
                result may have fewer groups, even none. The run records which.
            kv: `keep` lets weights change between two tokens of a sample, within the staleness, while its cache stays; what comes after
                is `kv_stale`. By default weights change between samples.
        Returns:
            one row a response: its tokens, log-probabilities and versions, its `text`, and the prompt's columns.
        Raises:
            PromptTooLong (at the first look): a prompt and `max_new_tokens` exceed the model's context.
            DatasetError (at the first look): fewer than `count` groups were kept among `max_draws` prompts.
        """
        if not is_count(n) or n > MAX_GROUP:
            raise OptionError(f"n is {n!r}; a prompt has from 1 to {MAX_GROUP} responses, a whole number")
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_new_tokens)
        shown: dict[str, object] = {"n": n, "max_new_tokens": max_new_tokens}
        shown |= {"temperature": temperature} if temperature != 1.0 else {}
        shown |= {"staleness": staleness} if staleness is not None else {}
        shown |= ({"oversample": oversample} if oversample != 1.0 else {}) | {"late": late} if late != "wait" else {}
        shown |= {"timeout_s": timeout_s} if timeout_s is not None else {}
        shown |= {"kv": kv} if kv != "recompute" else {}
        allowed = self._session.staleness_of_generate(staleness)
        check_late(oversample, late, kv, allowed, timeout_s)
        if isinstance(prompts, Dataset):
            if late == "defer" and score is None and keep is None and max_draws is None:
                given = {"n": n, "sampling": sampling, "count": count, "oversample": oversample}
                return deferring(self, prompts, **given, staleness=allowed, kv=kv, shown=shown)  # type: ignore[arg-type]
            if late != "wait":
                raise OptionError(
                    f"oversample= and late={late!r} go with prompts that are given; count= draws as many as it needs",
                    now="Say generate(dataset.take(40), oversample=1.25, late=...) and filter what it gives, or leave them out here.",
                )
            return refill(
                self,
                prompts,
                n=n,
                sampling=sampling,
                count=count,
                score=score,
                keep=keep,
                max_draws=max_draws,
                staleness=allowed,
                kv=kv,
                shown=shown,
            )
        if not (count is None and score is None and keep is None and max_draws is None):
            now = "Pass the dataset itself: generate(dataset, count=..., score=...)."
            raise OptionError("count=, score=, keep= and max_draws= go with prompts that generate draws itself", now=now)
        if late == "defer":
            now = "Pass the dataset itself: generate(dataset, n=8, count=32, oversample=1.25, late='defer')."
            raise OptionError("late='defer' goes with prompts that generate draws itself: a long round draws none", now=now)
        asked = self._rows(prompts, "generate", PROMPTS)
        options: dict[str, object] = {"late": late, "oversample": oversample, "kv": kv}
        options |= {"timeout_s": timeout_s} if timeout_s is not None else {}
        return self._generate(asked, shown, n=n, sampling=sampling, staleness=allowed, **options)

    def _generate(self, prompts: Ref, shown: Mapping[str, object], *, staleness: int, **options: object) -> Rows:
        """Record a generate call with these options."""
        if carries(options):
            options |= self._carried(prompts, options["n"])
        repeat = self._session.count_generation(self.name, prompts.call)
        call = self._session.record(
            role=self.name,
            method="generate",
            engine="rollout",
            granularity=Granularity.SAMPLE,
            inputs={"prompts": prompts},
            options={**options, "repeat": repeat, "staleness": staleness},
            shown=shown,
            reads=(self._weights,),
            staleness=staleness,
        )
        return Rows(self._session, call)

    def _carried(self, prompts: Ref, n: object) -> dict[str, object]:
        """What a call takes over of the last one of its line."""
        assert isinstance(n, int)
        session = self._session
        previous, num_groups = session.carrier(self.name, "generate")
        before = previous.input("prompts") if previous is not None else None
        fields = (session.lineage.known(before.call).fields if before else None, session.lineage.known(prompts.call).fields)
        check_line(previous, n, fields)
        if previous is None:
            return {}
        distance = session.version(self._weights) - previous.reads[0].version
        return {"carries_from": previous.ordinal, "num_carried": num_groups, "updates_since": distance}

    def update(
        self,
        responses: Handle,
        rewards: Handle | None = None,
        *,
        advantages: AdvantageName | Handle = "grpo",
        loss: Loss | None = None,
        reference: Reference | Handle | None = None,
        columns: Mapping[str, Handle] | None = None,
        optimizer: AdamW | None = None,
        minibatch_size: int | None = None,
        epochs: int = 1,
        allow_unsound: bool = False,
    ) -> Metrics:
        """Train on these samples; later lines see the new weights.

        Args:
            rewards: one number a response. Without them, and without advantages, the loss must not need any.
            advantages: how rewards become advantages, within the group of one prompt's responses (`grpo` divides by the standard deviation
                of a sample, as TRL and verl do, `grpo_population` by the population's); or a handle with what other calls computed: one
                number a response, or a list with one for each generated token, or for each token.
            loss: PPO-clip by default (with rewards or advantages), negative log-likelihood without.
            reference: a `Reference` role, or its log-probabilities, for a loss with a KL term.
            columns: what else the loss needs, by name: numbers in the same forms as advantages. They win over a column of the samples.
            minibatch_size: prompts in a mini-batch, one optimiser step each; all of them by default. Membership goes by identity.
            epochs: passes over the samples.
            allow_unsound: train also where the loss can't be right for samples of other weights than these; the plan shows it.
        Returns:
            means over the call: `reward` (if rewards were given), `loss`, `grad_norm`, `response_length` and what the loss reports. Where
            a filter has left no row nothing is trained, and each of them is nan; `num_sequences` and `num_steps` are 0.
        Raises:
            TraceError: the loss takes the samples for those of the current weights, which they need not be (`m2flow.macro.soundness`).
            OpError (at the first look): numbers that do not fit the tokens of their samples.
        """
        if not isinstance(columns, Mapping | None):
            raise TraceError(f"update got columns={describe(columns)}", now='Give a mapping: columns={"weight": handle}.')
        responses = self._common(responses, rewards, advantages, reference, *(columns or {}).values())
        samples = self._rows(responses, "update", RESPONSES)
        has_rewards, is_named = rewards is not None, isinstance(advantages, str)
        if is_named:
            check_choice("advantages", advantages, AdvantageName, "or a handle with numbers of each sample")
        has_advantages = has_rewards or not is_named
        chosen = (_WITH_ADVANTAGES if has_advantages else _WITHOUT) if loss is None else loss
        passes = Passes(chosen, self.optimizer if optimizer is None else optimizer, minibatch_size, epochs, allow_unsound)
        given: dict[str, tuple[Ref, str]] = {}
        if has_rewards:
            given["rewards"] = self._column(rewards, "update", REWARDS)
        if not is_named:
            given["advantages"] = self._column(advantages, "update", NUMBERS)
        elif has_rewards and responses.maker.engine == "rollout" and responses.maker.options["n"] == 1:
            raise TraceError(
                f"advantages={advantages!r} compares the responses to one prompt, and {describe(responses)} have one for each",
                now="Generate with n=2 or more.",
            )
        given |= self._further_columns(columns)
        if "advantages" in passes.loss.needs and not has_advantages:
            raise TraceError(f"the loss {passes.loss.name} needs advantages, and this update got no rewards")
        if "reference_logprobs" in passes.loss.needs and reference is None:
            raise TraceError(f"the loss {passes.loss.name} needs a reference", now="Pass reference=Reference(...).")
        if isinstance(reference, Reference):
            reference = reference.logprobs(responses)
        if reference is not None:
            given["reference"] = self._column(reference, "update", REFERENCE)
        return self._train(samples, given, passes, advantages=advantages if has_rewards and is_named else None)

    def logprobs(self, responses: Handle) -> Rows:
        """The log-probability of each token of the responses under the weights as they are at this line; as `Reference.logprobs`."""
        return self._of_tokens(responses, "logprobs", "reference_logprobs")

    def _further_columns(self, columns: Mapping[str, Handle] | None) -> dict[str, tuple[Ref, str]]:
        for name in columns or {}:
            if name in _NOT_COLUMNS or not str(name).isidentifier():
                raise OptionError(
                    f"columns={{{name!r}: ...}}: that name is taken, or is none", now="Choose another, and use it in the loss."
                )
        return {name: self._column(handle, "update", NUMBERS) for name, handle in (columns or {}).items()}


class Reference(Role):
    """A frozen model, for log-probabilities to compare with: where a policy started, or a teacher.

    Args:
        model: a policy, whose weights as they are at this line are kept; or a path as `Policy` takes. In a later step it may be made
            of that policy again, to compare with newer weights from there on: `reference = Reference(policy)` every so many steps. The
            older weights are gone then; a reference of another `name` keeps its own.
        dtype, chat: of a path; as `Policy`.
    """

    def __init__(
        self,
        model: Policy | str | Path,
        *,
        name: str = "reference",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
    ) -> None:
        super().__init__(name, "Reference")
        if isinstance(model, Policy):
            self._copy(model.name, "lm")
        else:
            self._session.add_model(
                name, Model(model_path(model), "pretrained", self._session.seed, dtype, chat, is_policy=False, is_frozen=True)
            )

    def logprobs(self, responses: Handle) -> Rows:
        """The log-probability of each token of the responses under this model: a ragged row a response, 0 for what is no response."""
        self._check_is_newest()
        return self._of_tokens(responses, "logprobs", "reference_logprobs")


_TIMEOUT_S = 60.0
"""What a sample's reward may take, where the flow does not say."""


class Reward(Role):
    """A user's function that judges one sample: `fn(sample) -> float`, plain or async.

    Args:
        function: gets a `Sample` (`.text`, `.prompt`, and the prompt row's columns). It may also give a mapping, or a dataclass, with
            `reward`, the number that counts, and what that is made of, by name: `{"reward": 0.7, "right": 1.0, "brevity": -0.3}`. The
            parts are recorded with the sample, and nothing computes with them.
        timeout_s: seconds that one sample may take; None: as long as it needs.
        isolated: whether each sample is judged in a process that can be killed alone, on its main thread: for what may hang, crash, take
            all memory or hold the interpreter's lock, or sets signal handlers. By default where `timeout_s` is another than 60 and the
            function is not async. Elsewhere it runs on a thread, which is quicker by some tenths of a millisecond, and which a time limit
            only abandons.
        on_error: the reward of a sample on which the function raises, takes too long, ends its process or returns no finite number. Its
            record says which, as a part of the reward: `raised`, `timed_out`, `died` or `invalid`. By default such a sample is an error.
    """

    def __init__(
        self,
        function: Callable[[Sample], object],
        *,
        name: str | None = None,
        timeout_s: float | None = _TIMEOUT_S,
        isolated: bool | None = None,
        on_error: Literal["raise"] | float = "raise",
    ) -> None:
        if not callable(function):
            raise TraceError(f"Reward needs a function, got {type(function).__name__}")
        super().__init__(str(getattr(function, "__name__", "reward")) if name is None else name, "Reward")
        check_seconds("timeout_s", timeout_s)
        self.function = function
        if isinstance(on_error, str):
            check_choice("on_error", on_error, ("raise",), otherwise="or the reward of a sample that can't be judged")
        else:
            check_number("on_error", on_error)
        self.is_isolated = is_isolated(function, isolated, None if timeout_s == _TIMEOUT_S else timeout_s)
        self.timeout_s = timeout_s
        self.on_error = None if isinstance(on_error, str) else float(on_error)

    def score(self, responses: Handle) -> Scores:
        """One finite number for each response."""
        if isinstance(responses, Rows) and responses.scored_by is self:
            return _scores_held(responses)
        return self._score(responses)

    @property
    def _failing(self) -> dict[str, object]:
        """The options that say what becomes of a sample which can't be judged."""
        isolated = {"isolated": True} if self.is_isolated else {}
        return {**isolated, **({"on_error": self.on_error} if self.on_error is not None else {})}

    def _score(self, responses: Handle, **options: object) -> Scores:
        """Record a score call with these further options."""
        call = self._session.record(
            role=self.name,
            method="score",
            engine="function",
            granularity=Granularity.SAMPLE,
            inputs={"samples": self._rows(responses, "score", ROWS)},
            options={
                "function": self.function,
                "timeout_s": self.timeout_s,
                "column": "reward",
                **self._failing,
                **options,
            },
            shown={},
        )
        return Scores(self._session, call)


def _scores_held(responses: Rows) -> Scores:
    """The rewards that rows have already, from a refill."""
    session = responses._session
    call = session.record(
        role="rewards",
        method="",
        engine="function",
        granularity=Granularity.SAMPLE,
        inputs={"samples": responses.ref},
        options={"function": _reward_column, "timeout_s": None, "column": "reward", "style": "columns"},
        shown={},
    )
    return Scores(session, call)


def _reward_column(rows: Batch, values: Mapping[str, object]) -> Column:
    return rows["reward"]
