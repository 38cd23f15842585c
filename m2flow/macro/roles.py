"""The built-in roles of a flow (Policy, Reference, Reward; `m2flow.macro.critics` has others), and what their calls declare.

    responses = policy.generate(prompts, n=8, max_new_tokens=64)
    rewards = verifier.score(responses)
    policy.update(responses, rewards, reference=reference)

A role says what a call reads and writes, on which unit it may be run, and what kind of engine executes it. It knows nothing of where that
engine is. An `InputKind` says which handles fit an input of a call. Whether the numbers behind a handle have the right shape is checked
where they are used (`m2flow.micro.protocol.update_semantics`): a trace has no values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np

from m2flow.errors import OptionError, TraceError, did_you_mean
from m2flow.macro.columns import ColumnFunction
from m2flow.macro.datasets import Dataset
from m2flow.macro.graph import Granularity, Ref, user_site
from m2flow.macro.handles import Handle, Metrics, Rows, Scores, describe, is_isolated
from m2flow.macro.loss_declarations import check_comparison, check_update, missing_need, nll, ppo_clip
from m2flow.macro.ops import EpisodeRows, Failed, check_of_one_sample, log, record_episodes, speakers_of
from m2flow.macro.oversampling import carries, check_late, check_line, windows
from m2flow.macro.refill import Draws, Keep, refill
from m2flow.macro.session import Session, current_session
from m2flow.macro.tail_batching import generate_deferred
from m2flow.recipe import (
    COMPUTED,
    HEAD_OUTPUTS,
    PROXIMAL,
    REFERENCE_TOP_IDS,
    REFERENCE_TOP_LOGPROBS,
    VERSION_AGES,
    AdamW,
    Advantage,
    AdvantageName,
    Balance,
    BatchAdvantage,
    ChatTemplate,
    Correction,
    Episodes,
    History,
    Lora,
    Loss,
    Model,
    Optimizer,
    Routing,
    Sampling,
    as_json,
    as_pairs,
    as_texts,
    as_tuple,
    check_choice,
    check_count,
    check_flag,
    check_instance,
    check_number,
    check_optimizer,
    check_seconds,
    check_text,
    is_count,
    model_path,
    number_or_column,
)
from m2flow.samples import MAX_GROUP, SAMPLING_MASK, Batch, Column, Sample


@dataclass(frozen=True)
class InputKind:
    """A kind of input of a call: which handles fit, and what to do about those that do not."""

    what: str
    fit: Callable[[Rows], bool]
    now: str

    def checked(self, session: Session, handle: object, by: str) -> tuple[Ref, str]:
        """Check an input of a call that `by` records. Returns it with the column of its rows that counts; empty for whole samples."""
        if not isinstance(handle, Rows) or not self.fit(handle):
            raise TraceError(f"{by} needs {self.what}, and got {describe(handle)}", now=self.now)
        return handle.check(session, by), handle.column or ""


def _has_target(rows: Rows) -> bool:
    held = rows.call.options.get("rows")
    return isinstance(held, Batch) and "target" in held


def _has_samples(rows: Rows) -> bool:
    """Whether rows are whole samples: generated ones, or derived from those by a filter, a union or new columns."""
    return rows.column is None and (rows.call.engine == "rollout" or rows.call.options.get("gives") in ("kept", "concat", "rows"))


ROWS = InputKind("responses", lambda rows: True, "Responses come from policy.generate(...).")
PROMPTS = InputKind(
    "prompts",
    lambda rows: rows.column is None and rows.maker.engine in ("source", "rollout"),
    "Prompts come from a Dataset: prompts=dataset.take(32).",
)
RESPONSES = InputKind(
    "responses, or rows with a 'target'",
    lambda rows: _has_samples(rows) or _has_target(rows),
    "Responses come from policy.generate(...), demonstrations from a Dataset whose rows have a 'target'.",
)
REWARDS = InputKind(
    "rewards", lambda rows: rows.column is not None, "Rewards are one number a sample: Reward(function).score(responses), or made from it."
)
REFERENCE = InputKind(
    "a reference", lambda rows: rows.column is not None, "Pass a Reference, or log-probabilities such as its logprobs(responses)."
)
NUMBERS = InputKind(
    "numbers of each sample",
    lambda rows: rows.column is not None,
    "Pass what a call computed from the responses: one number a sample, or one a token.",
)


class BuiltInRole:
    """Base of the built-in roles: a name in the flow, and a session."""

    def __init__(self, name: str, kind: str) -> None:
        check_text("name", name)
        self.name = name
        self._session = current_session(f"{kind}({name!r})")

    @property
    def _weights(self) -> str:
        """The resource that calls of a role with a model read and write."""
        return f"{self.name}.weights"

    def _rows(self, handle: object, method: str, wants: InputKind) -> Ref:
        """A handle as an input of one of this role's calls, if it has the rows that the call wants."""
        return self._column(handle, method, wants)[0]

    def _column(self, handle: object, method: str, wants: InputKind) -> tuple[Ref, str]:
        """Check an input as `_rows` does. Returns it with the column of its rows that counts; empty for whole samples."""
        return wants.checked(self._session, handle, f"{self.name}.{method}")

    def _common(self, responses: Handle, *others: object) -> Handle:
        """Drop the responses that a filter of the other inputs has dropped."""
        for other in others:
            if isinstance(responses, Rows) and isinstance(other, Rows):
                responses = responses.within(other)
        return responses

    def _copy(self, source: str, head: Literal["lm", "value"], share: float = 1.0) -> None:
        """Copy the weights that a policy has at this line, as far as a model with this head has them too. A reference may be made of the
        same policy again: the role has the newer weights then, and only the newer object stands for it. With a `share` below 1 it keeps the
        rest of its own."""
        session, site = self._session, user_site()
        before = session.copies.get(self.name)
        model = replace(session.models[source], head=head, is_policy=False, routing=None, balance=None)
        if before is None or before[1] != source or head != "lm" or session.models[self.name] != model:
            session.add_model(self.name, model, is_copy=True)
        session.copies[self.name] = (self, source, site)
        options = {"source": source} if share == 1 else {"source": source, "share": float(share)}
        session.record(
            role=self.name,
            method="copy_of",
            engine="train",
            granularity=Granularity.BATCH,
            inputs={},
            options=options,
            shown=options,
            reads=(f"{source}.weights",) if before is None else (f"{source}.weights", self._weights),
            writes=(self._weights,),
            is_aligned=False,
        )

    def _check_is_newest(self) -> None:
        """Raises TraceError: another object has this role's name by now, and the role has its weights."""
        newest = self._session.copies.get(self.name)
        if newest is not None and newest[0] is not self:
            raise TraceError(
                f"the {self.name!r} that is used here was made anew at {newest[2]}, and its weights were replaced there",
                now=f"Use the new one. To keep both, give each a name: Reference(policy, name='{self.name}_2').",
            )

    def _of_tokens(self, responses: Handle, method: str, column: str, top_k: int | None = None) -> Rows:
        """Record a call that evaluates the role's model on each token of the responses, with the weights of this line."""
        if top_k is not None:
            check_count("top_k", top_k)
            if isinstance(responses, Rows) and SAMPLING_MASK in (responses.fields or ()):
                raise TraceError("top_k compares whole distributions, not those of responses with a sampling mask", now="Leave one out.")
        options = {} if top_k is None else {"top_k": top_k}
        call = self._session.record(
            role=self.name,
            method=method,
            engine="train",
            granularity=Granularity.SAMPLE,
            inputs={"samples": self._rows(responses, method, RESPONSES)},
            options=options,
            shown=options,
            reads=(self._weights,),
        )
        return Rows(self._session, call, column, tokens_of=responses if isinstance(responses, Rows) else None)

    def _train(self, samples: Ref, given: Mapping[str, tuple[Ref, str]], settings: UpdateSettings, **options: object) -> Metrics:
        """Record an update on these samples, with the columns that come from other calls."""
        self._check_needs(samples, settings.loss, given)
        shown: dict[str, object] = {"loss": settings.loss.name}
        shown |= {"correction": settings.loss.correction.level} if settings.loss.correction is not None else {}
        shown |= {"advantages": str(options["advantages"])} if options.get("advantages") else {}
        shown |= {"minibatch_size": settings.minibatch_size} if settings.minibatch_size is not None else {}
        shown |= {"epochs": settings.epochs} if settings.epochs != 1 else {}
        shown |= {"allow_unsound": True} if settings.allow_unsound else {}
        origins = [call for call in self._session.origins(samples.call) if call.engine == "rollout"]
        samplers = self._session.lineage.samplers(samples.call)
        if not settings.allow_unsound:
            own = [call for call in origins if self.name in samplers and self.name in call.speakers]
            check_update(
                settings.loss,
                own,
                name=self.name,
                version=self._session.version(self._weights),
                epochs=settings.epochs,
                minibatch_size=settings.minibatch_size,
            )
        optimizer, position = self._scheduled(settings.optimizer)
        call = self._session.record(
            role=self.name,
            method="update",
            engine="train",
            granularity=Granularity.MINIBATCH if settings.minibatch_size else Granularity.BATCH,
            inputs={"samples": samples, **{name: ref for name, (ref, _) in given.items()}},
            options={
                "advantages": None,
                "columns": {name: column for name, (_, column) in given.items()},
                "loss": settings.loss,
                "optimizer": optimizer,
                "minibatch_size": settings.minibatch_size,
                "epochs": settings.epochs,
                "windows": windows(origins),
                **({"sampled_by_others": True} if samplers - {self.name} else {}),
                **({"by_group": True} if settings.loss.is_of_groups else {}),
                **position,
                **options,
            },
            shown=shown,
            reads=(self._weights,),
            writes=(self._weights,),
            is_aligned=False,
        )
        return Metrics(self._session, call)

    def _scheduled(self, optimizer: Optimizer) -> tuple[Optimizer, dict[str, object]]:
        """Adapt the optimiser's schedule to the flow's loop. Returns it, and the option that says where in the loop the update is."""
        if not optimizer.counts_flow_steps:
            return optimizer, {}
        if self._session.loop is None:
            raise TraceError(
                f"the schedule of {self.name}.update goes by the flow's steps, and the update is in no loop over steps(...)",
                now="Give the optimiser total_steps, which then counts the optimiser's steps.",
            )
        step, num_steps = self._session.loop
        return optimizer.in_loop(num_steps), {"loop_step": step}

    def _check_needs(self, samples: Ref, loss: Loss, given: Mapping[str, tuple[Ref, str]]) -> None:
        """Refuse a loss that needs what neither the model, nor the samples, nor this update have, as far as that is known."""
        head = self._session.models[self.name].head
        foreign = HEAD_OUTPUTS["value" if head == "lm" else "lm"]
        fields = self._session.lineage.known(samples.call).fields
        for need in loss.needs:
            if need in foreign:
                whose = "a language model's, and this is a critic" if head == "value" else "a critic's: Critic(...).update"
                raise TraceError(f"the loss {loss.name} needs {need!r}, which are {whose}", now="Take a loss for this role.")
            is_given = need in given and need not in _NOT_COLUMNS  # Of `rewards` and `reference` the loss sees what is made of them.
            is_given |= need in COMPUTED or need in ("advantages", "reference_logprobs", REFERENCE_TOP_LOGPROBS)
            if not is_given and fields is not None and ("versions" if need == VERSION_AGES else need) not in fields:
                raise missing_need(loss, need, self.name, fields, is_taken=need in _NOT_COLUMNS)

    def _further_columns(self, columns: Mapping[str, Handle] | None, *taken: str) -> dict[str, tuple[Ref, str]]:
        for name in columns or {}:
            if name in _NOT_COLUMNS.union(taken) or not str(name).isidentifier():
                raise OptionError(
                    f"columns={{{name!r}: ...}}: that name is taken, or is none", now="Choose another, and use it in the loss."
                )
        return {name: self._column(handle, "update", NUMBERS) for name, handle in (columns or {}).items()}


def check_columns(columns: object) -> None:
    """Check that `columns` of an update is a mapping or None. Raises `TraceError`."""
    if columns is not None and not isinstance(columns, Mapping):
        raise TraceError(f"update got columns={describe(columns)}", now='Give a mapping: columns={"weight": handle}.')


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update: what it minimises, and in how many steps over its samples. Raises `OptionError` if a setting is invalid."""

    loss: Loss
    optimizer: Optimizer
    minibatch_size: int | None
    epochs: int
    allow_unsound: bool = False

    def __post_init__(self) -> None:
        if self.minibatch_size is not None:
            check_count("minibatch_size", self.minibatch_size)
        check_count("epochs", self.epochs)
        check_flag("allow_unsound", self.allow_unsound)
        if not isinstance(self.loss, Loss):
            raise OptionError(f"loss={self.loss!r:.60} is no loss", now="Pass ppo_clip(), nll(), or a function under @loss(...).")
        check_optimizer(self.optimizer)


@dataclass(frozen=True)
class GenerateSettings:
    """Settings of a generate call, wherever its prompts come from. Raises `OptionError` if one is invalid or does not go with another."""

    n: int
    sampling: Sampling
    asked_staleness: int | None
    """What the program says; `staleness` is that, or the flow's."""
    staleness: int
    oversample: float
    late: Literal["wait", "drop", "carry", "defer"]
    timeout_s: float | None
    kv: Literal["recompute", "keep"]

    def __post_init__(self) -> None:
        if not is_count(self.n) or self.n > MAX_GROUP:
            raise OptionError(f"n is {self.n!r}; a prompt has from 1 to {MAX_GROUP} responses, a whole number")
        check_late(self.oversample, self.late, self.kv, self.staleness, self.timeout_s)

    @property
    def common(self) -> dict[str, object]:
        """Options that every generate call has."""
        return {"n": self.n, "sampling": self.sampling, "kv": self.kv}

    @functools.cached_property
    def options(self) -> Mapping[str, object]:
        """Options of a call whose prompts are given."""
        options: dict[str, object] = {**self.common, "late": self.late, "oversample": self.oversample}
        return options | ({"timeout_s": self.timeout_s} if self.timeout_s is not None else {})

    @functools.cached_property
    def shown(self) -> Mapping[str, object]:
        """What the graph shows of the call: its sizes, and the options that differ from their defaults."""
        shown: dict[str, object] = {"n": self.n, "max_new_tokens": self.sampling.max_new_tokens}
        temperature = self.sampling.temperature_of or self.sampling.temperature
        shown |= {"temperature": temperature} if temperature != 1.0 else {}
        shown |= {"stop": list(self.sampling.stop)} if self.sampling.stop else {}
        told, usual = ("temperature", "temperature_of", "stop"), vars(Sampling(self.sampling.max_new_tokens))
        shown |= {name: value for name, value in vars(self.sampling).items() if name not in told and value != usual[name]}
        shown |= {"staleness": self.asked_staleness} if self.asked_staleness is not None else {}
        shown |= ({"oversample": self.oversample} if self.oversample != 1.0 else {}) | {"late": self.late} if self.late != "wait" else {}
        shown |= {"timeout_s": self.timeout_s} if self.timeout_s is not None else {}
        shown |= {"kv": self.kv} if self.kv != "recompute" else {}
        return shown


def _settings(drawn: dict[str, Any], *others: Any) -> GenerateSettings:
    """Check the settings of a generate call. A loop gives the same ones in each step, and gets the same object then."""
    if drawn["stop_token_ids"] or drawn["logit_bias"]:  # The cache does not tell 1 from True inside a tuple.
        return _new_settings(*others, **drawn)
    try:
        return _known_settings(*others, **drawn)
    except TypeError:  # One of them can't be hashed, so it is none that is right, and is refused by its name.
        return _new_settings(*others, **drawn)


def _new_settings(max_new_tokens: int, *others: Any, **drawn: Any) -> GenerateSettings:
    n, *further = others
    return GenerateSettings(n, Sampling(max_new_tokens, **drawn), *further)


_known_settings = functools.lru_cache(maxsize=256, typed=True)(_new_settings)


_WITH_ADVANTAGES, _WITHOUT = ppo_clip(), nll()
"""What an update minimises that names no loss."""

_ADVANTAGES, _OVER_BATCH = get_args(AdvantageName), get_args(BatchAdvantage)
_NOT_COLUMNS = {"samples", "rewards", "reward", "advantages", "reference", "reference_logprobs", "tokens", "loss_mask"}
_NOT_COLUMNS |= {REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS, VERSION_AGES} | COMPUTED
"""What `columns` of an update may not be called: it has another source."""


# ---- Policy and Reference


def _check_given_prompts(late: str, draws: Draws) -> None:
    """Raise `OptionError` for options of a generate call that draws its prompts from a dataset, where prompts are given."""
    if draws != Draws():
        now = "Pass the dataset itself: generate(dataset, count=..., score=...)."
        raise OptionError("count=, score=, keep= and max_draws= go with prompts that generate draws itself", now=now)
    if late == "defer":
        now = "Pass the dataset itself: generate(dataset, n=8, count=32, oversample=1.25, late='defer')."
        raise OptionError("late='defer' goes with prompts that generate draws itself: a long round draws none", now=now)


class Policy(BuiltInRole):
    """A language model that is sampled from and trained.

    Args:
        model: a Hugging Face model directory, a .gguf file, or a name of the Hugging Face hub, such as `Qwen/Qwen2.5-0.5B-Instruct`:
            then what huggingface_hub's cache has is used, and what it lacks is downloaded where there is a network.
        init: `random` draws the weights instead of loading them; only the config and the tokenizer are read then.
        dtype: of the weights that are trained.
        rollout_dtype: what engines that sample hold them in, by default the same. `bfloat16` halves what they read for a token; each
            sampled token's log-probability is then that of the rounded weights.
        chat: put prompts that are texts through the tokenizer's chat template, as a user's message; any of the next four does so too.
            Without it a text is *raw*: the tokenizer adds its own special tokens, as a beginning-of-sequence token, and nothing else. A
            prompt of messages always goes through the template, which then decides on all special tokens.
        system: the system message of conversations that bring none.
        chat_template: a Jinja template, or the path of one, in place of the tokenizer's.
        chat_template_kwargs: further variables of the template: `{"enable_thinking": False}`.
        tools: JSON descriptions of functions, which the template presents to the model.
        optimizer: for `update` calls that bring none.
        lora: train adapters of low rank, not the weights themselves. Engines that sample get the sum of both.
        revision: of a model of the hub, a branch, tag or commit; by default its main branch.
        replay_routing: of a mixture of experts, whose choice of experts the trainer goes by, token by token, with gates computed from its
            own logits: `rollout`, that of the engine that sampled (R3), recorded with each sample; or `trainer`, that of its own pass
            before the update (R2), which each update then makes. By default each pass chooses anew, and where engines round differently
            a token may go to other experts. A `Reference` chooses for itself. `rerouted` is the share that would have chosen others.
        balance: of a mixture of experts, what keeps their loads even in updates; these report `balance_loss` and `z_loss`.
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
        system: str | None = None,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        optimizer: Optimizer | None = None,
        lora: Lora | None = None,
        revision: str | None = None,
        replay_routing: Routing | None = None,
        balance: Balance | None = None,
    ) -> None:
        super().__init__(name, "Policy")
        self.optimizer = AdamW() if optimizer is None else optimizer
        check_optimizer(self.optimizer)
        template = ChatTemplate.of(system, chat_template, chat_template_kwargs, tools)
        check_flag("chat", chat)
        made = Model(model_path(model), init, self._session.seed, dtype, chat or template != ChatTemplate())
        more: dict[str, Any] = {"lora": lora, "template": template, "revision": revision, "routing": replay_routing}
        self._session.add_model(name, replace(made, rollout_dtype=rollout_dtype, balance=balance, **more))

    def generate(
        self,
        prompts: Handle | Dataset,
        *,
        n: int = 1,
        max_new_tokens: int,
        temperature: float | str = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        regex: str = "",
        json_schema: Mapping[str, object] | str = "",
        grammar: str = "",
        sampling_mask: bool = False,
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
        """Sample `n` responses to each prompt from the weights as they are at this line, or older ones as far as the staleness allows.

        Args:
            prompts: rows to answer; or a dataset, from which prompts are drawn until `count` groups are kept.
            max_new_tokens: of a response at most; where the context ends before, so does the response, and its finish is `length`.
            temperature: 0 is greedy. A text is the name of a column of the prompts, with the temperature of each.
            top_k, min_p: 0 is off. top_p: 1 is off. min_new_tokens: before so many no response ends. (No beam search: it does not sample.)
            stop: texts that end a response: it has all tokens up to the one that completes the first of them, and its `text` ends before
                it, or with it if `include_stop`. Where in the tokens a text begins and ends does not matter. The text of a special token
                means that token.
            stop_token_ids: tokens that end a response besides the end-of-sequence tokens; with `ignore_eos` instead of them.
            repetition_penalty: above 1, tokens that prompt or response have become less likely. logit_bias: token to what is added to its
                logit. Neither changes the log-probabilities that are reported: as with top-k, they are the model's own.
            regex, json_schema, grammar: what a response must be: what an expression matches, an instance of a JSON Schema, or a sentence of
                a grammar (GBNF or Lark); by llguidance (`m2flow[grammar]`). It ends where it is whole, or cut off at max_new_tokens.
            sampling_mask: record what each token was drawn from, up to 1,024; log-probabilities, the trainer's too, are among these alone.
            count: groups to keep; rejected ones are replaced while others still run. With `late="defer"`, those that each turn gives.
            score: judges the responses that are drawn this way; `score(responses)` of the result costs nothing more.
            keep: says of a group's samples, which have a `reward`, whether it counts; may be async. By default: different rewards.
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
            PromptTooLong (at the first look): a prompt leaves no room for a response in the model's context.
            DatasetError (at the first look): fewer than `count` groups were kept among `max_draws` prompts.
        """
        drawn: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "ignore_eos": ignore_eos, "include_stop": include_stop}
        drawn |= {"min_new_tokens": min_new_tokens, "repetition_penalty": repetition_penalty, "regex": regex, "grammar": grammar}
        drawn |= {"stop": as_texts(stop), "stop_token_ids": as_tuple(stop_token_ids), "logit_bias": as_pairs(logit_bias)}
        drawn["temperature"], drawn["temperature_of"] = number_or_column("temperature", temperature)
        drawn["json_schema"], drawn["sampling_mask"] = as_json(json_schema), sampling_mask
        allowed = self._session.staleness_of_generate(staleness)
        settings = _settings(drawn, max_new_tokens, n, staleness, allowed, oversample, late, timeout_s, kv)
        draws = Draws(count, score, keep, max_draws)
        if isinstance(prompts, Dataset):
            return self._generate_drawn(prompts, settings, draws)
        _check_given_prompts(late, draws)
        asked = self._rows(prompts, "generate", PROMPTS)
        return self._generate(asked, settings.shown, staleness=allowed, **settings.options)

    def _generate_drawn(self, source: Dataset, settings: GenerateSettings, draws: Draws) -> Rows:
        """Record the calls of a generation that draws its prompts from a dataset."""
        if settings.late == "defer":
            return generate_deferred(self, source, settings, draws.count, is_filtered=draws != Draws(draws.count))
        if settings.late != "wait":
            raise OptionError(
                f"oversample= and late={settings.late!r} go with prompts that are given; count= draws as many as it needs",
                now="Say generate(dataset.take(40), oversample=1.25, late=...) and filter what it gives, or leave them out here.",
            )
        return refill(self, source, settings, draws)

    def _generate(self, prompts: Ref, shown: Mapping[str, object], *, staleness: int, **options: object) -> Rows:
        """Record a generate call with these options."""
        self._check_column(prompts, options["sampling"])
        if carries(options):
            options |= self._carried(prompts, options)
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

    def _check_column(self, prompts: Ref, sampling: object) -> None:
        """Raises TraceError: the prompts are known not to have the column with the temperatures."""
        assert isinstance(sampling, Sampling)
        column, fields = sampling.temperature_of, self._session.lineage.known(prompts.call).fields
        if column and fields is not None and column not in fields:
            now = did_you_mean(column, sorted(fields))
            raise TraceError(f"{self.name}.generate takes temperatures from the column {column!r}, which the prompts do not have", now=now)

    def _carried(self, prompts: Ref, options: Mapping[str, object]) -> dict[str, object]:
        """The late groups that a call takes over from the previous one of its line."""
        session = self._session
        previous, num_groups = session.late_source(self.name, "generate")
        before = previous.input("prompts") if previous is not None else None
        fields = (session.lineage.known(before.call).fields if before else None, session.lineage.known(prompts.call).fields)
        check_line(previous, options, fields)
        if previous is None:
            return {}
        distance = session.version(self._weights) - previous.reads[0].version
        return {"carries_from": previous.ordinal, "num_carried": num_groups, "updates_since": distance}

    def rollout(
        self,
        agent: Callable[..., object],
        prompts: Handle,
        *,
        n: int = 1,
        max_tokens: int,
        max_turns: int = 16,
        timeout_s: float | None = None,
        turn_timeout_s: float | None = None,
        failed: Failed = "mask",
        history: History = "append",
        max_conversations: int = 1,
        speakers: Mapping[str, Policy | Mapping[str, object]] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        staleness: int | None = None,
    ) -> EpisodeRows:
        """Play `n` episodes of each row: an agent converses with the weights as they are at this line, over several turns, with tools.

        Args:
            agent: an async function under `@agent`, which gets a `Chat` and the row, and returns the reward.
            max_tokens: of a conversation after its first prompt, those of tools included. A turn that reaches it is cut off.
            max_turns: turns of the model, of a conversation.
            timeout_s, turn_timeout_s: seconds that an episode, or one turn of it, may take, without those until an engine takes the turn.
            failed: what becomes of an episode whose agent or tools failed: `mask`: it is in no result, so in no loss and no baseline;
                `raise`: it ends the run; `zero`: its reward is 0, if the model spoke. Each cause's number (`EpisodeFailure`) is logged.
            history: where the chat template rewrites what the model said once a further message follows: `append` keeps the tokens as they
                were sampled; `refuse` ends the run; `fork` goes on in a sequence that the template writes anew, beside what was sampled.
            max_conversations: in which the model speaks (`Chat.conversation`, `Chat.fork`); an agent that begins more ends the run.
            speakers: other policies that speak in the episodes, by the names of `Chat.conversation(by=...)`, with their weights as they are
                at this line: a rival, a judge. Each is drawn as the rollout says, or as a mapping: `{"policy": judge, "temperature": 0}`.
            temperature, top_p, top_k, stop, staleness: as for `generate`; `stop` of a single turn can be given to `Chat.say`.
        Returns:
            one row an episode: its tokens, of which a loss sees what the model said; `text`, its last turn; `num_turns`; and `reward`.
            What another speaker said is in rows of its own: `episodes.of("rival")`.
        """
        check_count("max_tokens", max_tokens)
        sampling = Sampling(max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=as_texts(stop))
        allowed = self._session.staleness_of_generate(staleness)
        spoken = speakers_of(self._session, self.name, speakers, sampling)
        bounds = Episodes(max_turns, timeout_s, turn_timeout_s, history, max_conversations, *spoken)
        settings = GenerateSettings(n, sampling, staleness, allowed, 1.0, "wait", None, "recompute")
        asked = self._rows(prompts, "rollout", PROMPTS)
        return record_episodes(self._session, self.name, agent, asked, settings.options, settings.shown, bounds, allowed, failed)

    def update(
        self,
        responses: Handle,
        rewards: Handle | None = None,
        *,
        advantages: AdvantageName | Advantage | Handle = "grpo",
        loss: Loss | None = None,
        reference: Reference | Handle | None = None,
        columns: Mapping[str, Handle] | None = None,
        optimizer: Optimizer | None = None,
        minibatch_size: int | None = None,
        epochs: int = 1,
        allow_unsound: bool = False,
        correction: Correction | None = None,
    ) -> Metrics:
        """Train on these samples; later lines see the new weights.

        Args:
            rewards: one number a response. Without them, and without advantages, the loss must not need any.
            advantages: how rewards become advantages: within the group of one prompt's responses (`grpo` divides by the standard deviation
                of a sample, as TRL and verl do, `grpo_population` by the population's; `dr_grpo`, `rloo`, `maxrl`, `opo`, `pass_at_k(4)`;
                `gigpo()` by turn, `by_conversation()` by the rewards of each conversation), or over all of the call's (`reinforce_pp`,
                `reinforce_pp_baseline`, `gpg`), which waits for them; or a handle with what other calls computed:
                one number a response, or a list with one for each generated or each token.
            loss: PPO-clip by default (with rewards or advantages), negative log-likelihood without.
            reference: a `Reference` role, or its log-probabilities, for a loss with a KL term.
            columns: what else the loss needs, by name: numbers in the same forms as advantages. They win over a column of the samples.
            minibatch_size: prompts in a mini-batch, one optimiser step each; all of them by default. Membership goes by identity.
            epochs: passes over the samples.
            allow_unsound: train also where the loss can't be right for samples of other weights than these; the plan shows it.
            correction: weigh tokens by the bounded ratio of the trainer's log-probabilities before the update to the rollout's.
        Returns:
            means over the call: `reward` (if rewards were given), `loss`, `grad_norm`, `response_length` and what the loss reports,
            `groups_without_advantage` (the share of groups all of whose advantages are 0) and `num_steps`. Without a row or a turn of
            the model there is no optimiser step (`num_skipped_steps`): they are nan.
        Raises:
            TraceError: the loss takes the samples for those of the current weights, which they need not be
            (`m2flow.macro.loss_declarations`).
            OpError (at the first look): numbers that do not fit the tokens of their samples.
        """
        check_columns(columns)
        responses = self._common(responses, rewards, advantages, reference, *(columns or {}).values())
        samples = self._rows(responses, "update", RESPONSES)
        has_rewards, is_named = rewards is not None, isinstance(advantages, str | Advantage)
        if isinstance(advantages, str):
            check_choice(
                "advantages", advantages, _ADVANTAGES, "pass_at_k(k), gigpo(), by_conversation(), or a handle with numbers of each sample"
            )
        has_advantages = has_rewards or not is_named
        chosen = (_WITH_ADVANTAGES if has_advantages else _WITHOUT) if loss is None else loss
        settings = UpdateSettings(chosen, self.optimizer if optimizer is None else optimizer, minibatch_size, epochs, allow_unsound)
        given: dict[str, tuple[Ref, str]] = {}
        if has_rewards:
            given["rewards"] = self._column(rewards, "update", REWARDS)
        if not is_named:
            given["advantages"] = self._column(advantages, "update", NUMBERS)
        elif has_rewards and advantages in _OVER_BATCH:
            over_batch = self._over_batch(str(advantages), responses, rewards)
            given["advantages"] = self._column(over_batch, "update", NUMBERS)
        elif has_rewards and responses.maker.engine == "rollout":
            check_comparison(advantages, responses)
        given |= self._further_columns(columns)
        check_instance("correction", correction, Correction, "correction=Correction(upper=2.0)")
        if correction is not None:
            settings = replace(settings, loss=replace(settings.loss, correction=correction))
        replays_own = self._session.models[self.name].routing == "trainer" and isinstance(responses, Rows) and _has_samples(responses)
        if (correction is not None or replays_own) and PROXIMAL not in given:
            before = self.logprobs(responses)  # A result is dropped with its last handle, so this lives until the update is recorded.
            given[PROXIMAL] = self._column(before, "update", NUMBERS)
        _check_needs(settings.loss, reference, has_advantages=has_advantages)
        if isinstance(reference, Reference):
            reference = reference.logprobs(responses)
        if reference is not None:
            given["reference"] = self._column(reference, "update", REFERENCE)
        by_group = advantages if has_rewards and "advantages" not in given else None
        return self._train(samples, given, settings, advantages=by_group)

    def _over_batch(self, name: str, responses: Handle, rewards: Handle | None) -> Rows:
        """Record a call that computes advantages from all rewards of an update."""
        given = {"samples": (self._rows(responses, "update", RESPONSES), ""), "rewards": self._column(rewards, "update", REWARDS)}
        call = self._session.record(
            role=name,
            method="",
            engine="function",
            granularity=Granularity.BATCH,
            inputs={key: ref for key, (ref, _) in given.items()},
            options={
                "function": ColumnFunction("m2flow.algorithms.advantages", "of_batch", (("name", name),)),
                "style": "columns",
                "gives": "column",
                "column": "advantages",
                "columns": {"rewards": given["rewards"][1]},
                "timeout_s": None,
            },
            shown={},
        )
        return Rows(self._session, call, "advantages")

    def logprobs(self, responses: Handle, *, top_k: int | None = None) -> Rows:
        """The log-probability of each token of the responses under the weights as they are at this line; with `top_k` as
        `Reference.logprobs`."""
        return self._of_tokens(responses, "logprobs", "reference_logprobs", top_k)


class Reference(BuiltInRole):
    """A frozen model, for log-probabilities to compare with: where a policy started, or a teacher.

    Args:
        model: a policy, whose weights as they are at this line are kept; or a path as `Policy` takes. In a later step it may be made
            of that policy again, to compare with newer weights from there on: `reference = Reference(policy)` every so many steps. The
            older weights are gone then; a reference of another `name` keeps its own.
        dtype, chat, revision: of a path; as `Policy`.
    """

    def __init__(
        self,
        model: Policy | str | Path,
        *,
        name: str = "reference",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
        revision: str | None = None,
    ) -> None:
        super().__init__(name, "Reference")
        if isinstance(model, Policy):
            self._copy(model.name, "lm")
        else:
            self._session.add_model(
                name,
                Model(model_path(model), "pretrained", self._session.seed, dtype, chat, is_policy=False, is_frozen=True, revision=revision),
            )

    def follow(self, share: float) -> None:
        """Move towards the policy that this was made of: the weights become `1 - share` of their own and `share` of the policy's now.

        In each step it makes the reference a moving average of the policy; every so many steps it is a soft reset. The sum is of float32
        numbers, and rounded to the type of the weights: in bfloat16 a small share of a small difference is lost.

        Args:
            share: above 0; 1 is `Reference(policy)` made again.
        Raises:
            TraceError: this is of a path; or the policy has adapters, whose average is not that of the weights they make.
        Source:
            Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656, section 3; `ref_model_mixup_alpha` of TRL.
        """
        self._check_is_newest()
        check_number("share", share, above=0, high=1)
        if self.name not in self._session.copies:
            raise TraceError(f"{self.name}.follow: it is of a path, so there is no policy to follow", now="Make it by Reference(policy).")
        source = self._session.copies[self.name][1]
        if self._session.models[source].lora is not None:
            now = f"Make it again instead: Reference({source}) has the adapters of that line."
            raise TraceError(f"{self.name}.follow: {source} trains adapters, whose average is not that of the weights they make", now=now)
        self._copy(source, "lm", share)

    def logprobs(self, responses: Handle, *, top_k: int | None = None) -> Rows:
        """The log-probability of each token of the responses under this model: a ragged row a response, 0 for what is no response.

        Args:
            top_k: also find the likeliest tokens at each place, and how likely they and all others are, for `update(reference=...)` with a
                loss that compares distributions: `distill_top_k()`, or `ppo_clip(kl_coef=0.01, kl="top_k")`. Another 8 bytes for each of
                them and 4 for the others go with every generated token.
        """
        self._check_is_newest()
        return self._of_tokens(responses, "logprobs", "reference_logprobs", top_k)


# ---- Reward

_TIMEOUT_S = 60.0
"""What a sample's reward may take, where the flow does not say."""


class Reward(BuiltInRole):
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
            raise TraceError(f"Reward needs a function, got {type(function).__name__}", now="Pass a function of a sample.")
        check_of_one_sample(function)
        super().__init__(str(getattr(function, "__name__", "reward")) if name is None else name, "Reward")
        check_seconds("timeout_s", timeout_s)
        self.function = function
        if isinstance(on_error, str):
            check_choice("on_error", on_error, ("raise",), otherwise="or the reward of a sample that can't be judged")
        else:
            check_number("on_error", on_error)
        wished = getattr(function, "isolated", None)  # Rewards of m2flow.rewards that may hang say so themselves.
        isolated = wished if isolated is None and isinstance(wished, bool) else isolated
        self.is_isolated = is_isolated(function, isolated, None if timeout_s == _TIMEOUT_S else timeout_s)
        self.timeout_s = timeout_s
        self.on_error = None if isinstance(on_error, str) else float(on_error)

    @staticmethod
    def sum(
        parts: Mapping[Callable[[Sample], object], float],
        *,
        name: str = "reward",
        timeout_s: float | None = _TIMEOUT_S,
        isolated: bool | None = None,
        on_error: Literal["raise"] | float = "raise",
    ) -> RewardSum:
        """Make a reward that is a weighted sum of functions' rewards: `Reward.sum({MathAnswer(): 1.0, Repetition(): 0.1})`.

        Each function is judged in a call of its own, with this time limit, and its mean is logged as `NAME/FUNCTION`. The options are those
        of `Reward`, for each part. Where `generate(score=...)` draws prompts, all parts are judged in one call; they are recorded as
        parts of the reward then, and not logged.
        """
        return RewardSum(parts, name=name, timeout_s=timeout_s, isolated=isolated, on_error=on_error)

    def score(self, responses: Handle) -> Scores:
        """One finite number for each response."""
        if isinstance(responses, Rows) and responses.scored_by is self:
            return _scores_held(responses)
        return self.judge(responses)

    def judge(self, responses: Handle) -> Scores:
        """Score responses, with nothing logged and whatever they were scored by before."""
        return self._score(responses)

    @property
    def _failing(self) -> dict[str, object]:
        """The options that say what happens to a sample which can't be judged."""
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


@final
class RewardSum(Reward):
    """A weighted sum of rewards, made by `Reward.sum`."""

    def __init__(
        self,
        parts: Mapping[Callable[[Sample], object], float],
        *,
        name: str,
        timeout_s: float | None,
        isolated: bool | None,
        on_error: Literal["raise"] | float,
    ) -> None:
        from m2flow.rewards import WeightedSum  # It knows HTTP, which few flows need.

        check_text("name", name)
        if not isinstance(parts, Mapping) or not parts or not all(map(callable, parts)):
            now = "Give functions and their weights: Reward.sum({is_right: 1.0, is_short: 0.2})."
            raise TraceError(f"Reward.sum needs functions of a sample, and got {describe(parts)}", now=now)
        terms: dict[str, tuple[Callable[[Sample], object], float]] = {}
        for function, weight in parts.items():
            kind = str(getattr(function, "__name__", "part"))
            check_number(f"the weight of {kind}", weight)
            number = next(i for i in itertools.count(1) if (kind if i == 1 else f"{kind}_{i}") not in terms)
            terms[kind if number == 1 else f"{kind}_{number}"] = function, float(weight)
        self._parts = {
            part: Reward(function, name=part, timeout_s=timeout_s, isolated=isolated, on_error=on_error)
            for part, (function, _) in terms.items()
        }
        self._weights_of = tuple(weight for _, weight in terms.values())
        whole = WeightedSum(tuple((part, function, weight) for part, (function, weight) in terms.items()))
        is_any_isolated = True if any(part.is_isolated for part in self._parts.values()) else isolated
        super().__init__(whole, name=name, timeout_s=timeout_s, isolated=is_any_isolated, on_error=on_error)

    def score(self, responses: Handle) -> Scores:
        if isinstance(responses, Rows) and responses.scored_by is self:
            return super().score(responses)
        total, parts = self._judged(responses)
        log(**{f"{self.name}/{part}": scores.mean() for part, scores in parts.items()})
        return total

    def judge(self, responses: Handle) -> Scores:
        return self._judged(responses)[0]

    def _judged(self, responses: Handle) -> tuple[Scores, dict[str, Scores]]:
        parts = {name: part.judge(responses) for name, part in self._parts.items()}
        columns = [f"part_{i}" for i in range(len(parts))]
        call = self._session.record(
            role=self.name,
            method="sum",
            engine="function",
            granularity=Granularity.SAMPLE,
            inputs={column: scores.ref for column, scores in zip(columns, parts.values(), strict=True)},
            options={
                "function": ColumnFunction(__name__, "_weighted_sum", tuple(zip(columns, self._weights_of, strict=True))),
                "timeout_s": None,
                "column": "reward",
                "style": "columns",
                "columns": dict.fromkeys(columns, "reward"),
            },
            shown=dict(zip(parts, self._weights_of, strict=True)),
        )
        return Scores(self._session, call), parts


def _weighted_sum(rows: Batch, values: Mapping[str, object], **weights: float) -> Column:
    """Weight the columns of these names and add them up, in their order: float64 [N]."""
    total = np.zeros(len(rows))
    for name, weight in weights.items():
        total = total + weight * rows.dense(name).astype(np.float64)
    return total


def _scores_held(responses: Rows) -> Scores:
    """The rewards that rows already have, from a refill."""
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


def _check_needs(loss: Loss, reference: Reference | Handle | None, *, has_advantages: bool) -> None:
    """Raise TraceError for a loss that needs what an update was not given."""
    if "advantages" in loss.needs and not has_advantages:
        raise TraceError(f"the loss {loss.name} needs advantages, and this update got no rewards", now="Pass rewards=.")
    if "reference_logprobs" in loss.needs and reference is None:
        raise TraceError(f"the loss {loss.name} needs a reference", now="Pass reference=Reference(...).")
    if REFERENCE_TOP_LOGPROBS in loss.needs and not (isinstance(reference, Rows) and "top_k" in reference.call.options):
        now = "Pass them: update(..., reference=reference.logprobs(responses, top_k=16))."
        raise TraceError(f"the loss {loss.name} needs the reference's likeliest tokens", now=now)
