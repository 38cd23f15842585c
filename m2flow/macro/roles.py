"""The parties of a flow: Policy, Reference and Reward, and what each of their calls declares.

A role says what a call reads and writes, on which unit it may be run, and what kind of engine performs it. It knows nothing of
where that engine is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m2flow.errors import OptionError, TraceError
from m2flow.macro.graph import Granularity, Ref
from m2flow.macro.handles import Handle, Metrics, Rows, Scores, describe
from m2flow.macro.losses import nll, ppo_clip
from m2flow.macro.session import current_session
from m2flow.recipe import AdamW, Loss, Model, Sampling, is_count
from m2flow.samples import MAX_GROUP, Batch, Sample

AdvantageName = Literal["grpo", "dr_grpo", "rloo"]
ADVANTAGES: tuple[AdvantageName, ...] = ("grpo", "dr_grpo", "rloo")


@dataclass(frozen=True)
class _Wanted:
    """What an input of a call must be."""

    what: str
    fit: Callable[[Rows], bool]
    now: str


def _has_target(rows: Rows) -> bool:
    held = rows.call.options.get("rows")
    return isinstance(held, Batch) and "target" in held


def _has_samples(rows: Rows) -> bool:
    """Whether whole samples are there: generated ones, or what a filter, a union or new columns made of some."""
    return rows.call.engine == "rollout" or rows.call.options.get("gives") in ("kept", "concat", "rows")


_ROWS = _Wanted("responses", lambda rows: True, "Responses come from policy.generate(...).")
_PROMPTS = _Wanted(
    "prompts", lambda rows: rows.call.engine == "source" or _has_samples(rows), "Prompts come from a Dataset: prompts=dataset.take(32)."
)
_RESPONSES = _Wanted(
    "responses, or rows with a 'target'",
    lambda rows: _has_samples(rows) or _has_target(rows),
    "Responses come from policy.generate(...), demonstrations from a Dataset whose rows have a 'target'.",
)
_REWARDS = _Wanted("rewards", lambda rows: isinstance(rows, Scores), "Rewards come from Reward(function).score(responses).")
_REFERENCE = _Wanted(
    "a reference", lambda rows: rows.column == "reference_logprobs", "Pass a Reference, or what its logprobs(responses) gave."
)


class _Role:
    """What all roles share: a name in the flow, and the session that they belong to."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self._session = current_session(f"{kind}({name!r})")

    def _rows(self, handle: object, method: str, wants: _Wanted) -> Ref:
        """A handle as an input of one of this role's calls, if it has the rows that the call wants."""
        if not isinstance(handle, Rows) or not wants.fit(handle):
            raise TraceError(f"{self.name}.{method} needs {wants.what}, and got {describe(handle)}", now=wants.now)
        return handle.check(self._session, f"{self.name}.{method}")


class Policy(_Role):
    """A language model that is sampled from and trained.

    Args:
        model: a Hugging Face model directory, or a .gguf file.
        init: `random` draws the weights instead of loading them; only the config and the tokenizer are read then.
        chat: put prompts through the tokenizer's chat template.
        optimizer: for `update` calls that bring none.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "policy",
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        chat: bool = False,
        optimizer: AdamW | None = None,
    ) -> None:
        super().__init__(name, "Policy")
        self.optimizer = optimizer or AdamW()
        self._session.add_model(name, Model(str(model), init, self._session.seed, dtype, chat))

    @property
    def _weights(self) -> str:
        return f"{self.name}.weights"

    def generate(
        self,
        prompts: Handle,
        *,
        n: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_new_tokens: int = 0,
    ) -> Rows:
        """`n` responses to each prompt, drawn from the weights as they are at this line.

        Returns:
            one row a response: its tokens, log-probabilities and versions, its `text`, and the prompt's columns.
        Raises:
            PromptTooLong (at the first look): a prompt and `max_new_tokens` exceed the model's context.
        """
        if not is_count(n) or n > MAX_GROUP:
            raise OptionError(f"n is {n!r}; a prompt has from 1 to {MAX_GROUP} responses, a whole number")
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_new_tokens)
        shown: dict[str, object] = {"n": n, "max_new_tokens": max_new_tokens}
        shown |= {"temperature": temperature} if temperature != 1.0 else {}
        call = self._session.record(
            role=self.name,
            method="generate",
            engine="rollout",
            granularity=Granularity.SAMPLE,
            inputs={"prompts": self._rows(prompts, "generate", _PROMPTS)},
            options={"n": n, "sampling": sampling, "stream": self._session.next_stream()},
            shown=shown,
            reads=(self._weights,),
        )
        return Rows(self._session, call)

    def update(
        self,
        responses: Handle,
        rewards: Handle | None = None,
        *,
        advantages: AdvantageName = "grpo",
        loss: Loss | None = None,
        reference: Reference | Handle | None = None,
        optimizer: AdamW | None = None,
        minibatch_size: int | None = None,
        epochs: int = 1,
    ) -> Metrics:
        """Train on these samples; later lines see the new weights.

        Args:
            rewards: one number a response. Without them the samples are demonstrations and the loss must not need advantages.
            advantages: how rewards become advantages, within the group of one prompt's responses.
            loss: PPO-clip by default (with rewards), negative log-likelihood without.
            reference: a `Reference` role, or its log-probabilities, for a loss with a KL term.
            minibatch_size: prompts in a mini-batch, one optimiser step each; all of them by default. Membership goes by identity.
            epochs: passes over the samples.
        Returns:
            means over the call: `reward`, `loss`, `grad_norm`, `response_length` and what the loss reports.
        """
        if advantages not in ADVANTAGES:
            raise OptionError(f"advantages={advantages!r}; known are {', '.join(ADVANTAGES)}")
        if not (minibatch_size is None or is_count(minibatch_size)) or not is_count(epochs):
            raise OptionError(f"minibatch_size is {minibatch_size!r} and epochs is {epochs!r}; both are whole numbers, 1 or more")
        if not isinstance(loss, Loss | None):
            raise OptionError(f"loss={loss!r:.60} is no loss", now="Pass ppo_clip(), nll(), reinforce(), or a function under @loss(...).")
        if not isinstance(optimizer, AdamW | None):
            raise OptionError(f"optimizer={optimizer!r:.60} is no optimizer", now="Pass AdamW(lr=...).")
        inputs = {"samples": self._rows(responses, "update", _RESPONSES)}
        if rewards is not None:
            inputs["rewards"] = self._rows(rewards, "update", _REWARDS)
            if responses.maker.engine == "rollout" and responses.maker.options["n"] == 1:
                raise TraceError(
                    f"advantages={advantages!r} compares the responses to one prompt, and {describe(responses)} has one for each",
                    now="Generate with n=2 or more.",
                )
        loss = loss or (ppo_clip() if rewards is not None else nll())
        if "advantages" in loss.needs and rewards is None:
            raise TraceError(f"the loss {loss.name} needs advantages, and this update got no rewards")
        if "reference_logprobs" in loss.needs and reference is None:
            raise TraceError(f"the loss {loss.name} needs a reference", now="Pass reference=Reference(...).")
        if isinstance(reference, Reference):
            reference = reference.logprobs(responses)
        if reference is not None:
            inputs["reference"] = self._rows(reference, "update", _REFERENCE)
        shown: dict[str, object] = {"loss": loss.name}
        shown |= {"advantages": advantages} if rewards is not None else {}
        shown |= {"minibatch_size": minibatch_size} if minibatch_size is not None else {}
        shown |= {"epochs": epochs} if epochs != 1 else {}
        call = self._session.record(
            role=self.name,
            method="update",
            engine="train",
            granularity=Granularity.MINIBATCH if minibatch_size else Granularity.BATCH,
            inputs=inputs,
            options={
                "advantages": advantages if rewards is not None else None,
                "loss": loss,
                "optimizer": optimizer or self.optimizer,
                "minibatch_size": minibatch_size,
                "epochs": epochs,
            },
            shown=shown,
            reads=(self._weights,),
            writes=(self._weights,),
            is_aligned=False,
        )
        return Metrics(self._session, call)


class Reference(_Role):
    """A frozen model, for log-probabilities to compare with.

    Args:
        model: a policy, whose weights as they are at this line are kept; or a path as `Policy` takes.
    """

    def __init__(self, model: Policy | str | Path, *, name: str = "reference", chat: bool = False) -> None:
        super().__init__(name, "Reference")
        if not isinstance(model, Policy):
            self._session.add_model(name, Model(str(model), "pretrained", self._session.seed, chat=chat))
            return
        self._session.add_model(name, self._session.models[model.name])
        self._session.record(
            role=name,
            method="copy_of",
            engine="train",
            granularity=Granularity.BATCH,
            inputs={},
            options={"source": model.name},
            shown={"source": model.name},
            reads=(f"{model.name}.weights",),
            writes=(f"{name}.weights",),
            is_aligned=False,
        )

    def logprobs(self, responses: Handle) -> Rows:
        """The log-probability of each token of the responses under this model: one ragged row a response."""
        call = self._session.record(
            role=self.name,
            method="logprobs",
            engine="train",
            granularity=Granularity.SAMPLE,
            inputs={"samples": self._rows(responses, "logprobs", _RESPONSES)},
            options={},
            shown={},
            reads=(f"{self.name}.weights",),
        )
        rows = Rows(self._session, call)
        rows.column = "reference_logprobs"
        return rows


class Reward(_Role):
    """A user's function that judges one sample: `fn(sample) -> float`, plain or async.

    Args:
        function: gets a `Sample` (`.text`, `.prompt`, and the prompt row's columns).
        timeout_s: seconds that one sample may take.
    """

    def __init__(self, function: Callable[[Sample], object], *, name: str | None = None, timeout_s: float = 60.0) -> None:
        if not callable(function):
            raise TraceError(f"Reward needs a function, got {type(function).__name__}")
        super().__init__(name or str(getattr(function, "__name__", "reward")), "Reward")
        self.function = function
        self.timeout_s = timeout_s

    def score(self, responses: Handle) -> Scores:
        """One finite number for each response."""
        call = self._session.record(
            role=self.name,
            method="score",
            engine="function",
            granularity=Granularity.SAMPLE,
            inputs={"samples": self._rows(responses, "score", _ROWS)},
            options={
                "function": self.function,
                "timeout_s": self.timeout_s,
                "column": "reward",
            },
            shown={},
        )
        return Scores(self._session, call)
