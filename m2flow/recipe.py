"""The training recipe of a flow: models, sampling, optimiser and losses, as values that the flow language and engines share.

They are part of the program (they change the mathematics), so they live in the flow and never in a cluster spec.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from m2flow.errors import ModelError, OptionError, did_you_mean, lone_surrogate

Dtype = Literal["float32", "bfloat16", "float16"]
Init = Literal["pretrained", "random"]
Head = Literal["lm", "value", "score"]
Routing = Literal["rollout", "trainer"]
"""Whose experts a trainer replays: those of the engine that sampled (R3), or of its own pass before the update (R2)."""
GroupAdvantage = Literal["grpo", "grpo_population", "dr_grpo", "rloo", "maxrl", "opo"]
BatchAdvantage = Literal["reinforce_pp", "reinforce_pp_baseline", "gpg"]
AdvantageName = Literal[GroupAdvantage, BatchAdvantage]
"""Functions of `m2flow.algorithms.advantages`, listed here for flows, which load no torch."""
KlEstimator = Literal["k1", "k2", "k3"]
KlPenalty = Literal[KlEstimator, "top_k"]
Denominator = Literal["tokens", "sequences", "groups"]
"""How terms of tokens become one number, from counts of the whole mini-batch: the mean over tokens; the mean over sequences of the mean
over a sequence's tokens; the mean over groups of the mean over a group's tokens."""

# ---- argument checks: each raises `OptionError`, which names the option, and `m2flow.macro.session` adds the line.

MOST_COUNTED = 2**31 - 1
"""Samples, tokens, steps or times: counts of them are kept in 32 bits."""


def is_count(value: object) -> bool:
    """Whether a value is a whole number, 1 or more, of at most 31 bits. `True` and 2.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_COUNTED


def is_number(value: object) -> bool:
    """Whether a value is a finite number. `True` is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> None:
    """Check that a value is a finite number within low..high, and above `above`."""
    if is_number(value) and low <= value <= high and value > above:  # type: ignore[operator]
        return
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"{low:g} or more"] * (low > -math.inf and high == math.inf)
    bounds += ([f"from {low:g} to {high:g}"] if low > -math.inf else [f"{high:g} or less"]) if high < math.inf else []
    raise OptionError(f"{name} is {value!r:.60}; it must be a number" + (f", {' and '.join(bounds)}" if bounds else " that is finite"))


def check_count(name: str, value: object, *, least: int = 1, unit: str = "") -> None:
    """Check that a value is a whole number, `least` or more, of at most 31 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} is {value!r:.60}; it must be a whole number{unit and ' of '}{unit}, {least} or more")
    if value > MOST_COUNTED:
        raise OptionError(f"{name} is {value!r:.60}; it must be a whole number{unit and ' of '}{unit}, {MOST_COUNTED:,} or less")


def check_choice(name: str, value: object, known: object, otherwise: str = "", *, of: str = "") -> None:
    """Check that a text is one of these (a tuple of texts, or a `Literal`); the error names the nearest.

    Args:
        of: what has the option, where that is not plain from its name.
    """
    names: tuple[str, ...] = known if isinstance(known, tuple) else get_args(known)
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(names) + (f", {otherwise}" if otherwise else "")
        raise OptionError(f"{_given(name, value, of)}; known are {listed}", now=did_you_mean(str(value), names, ""))


def check_flag(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r:.60}; it must be True or False")


def check_text(name: str, value: object) -> None:
    """Check that a value is a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"{name} is {value!r:.60}; it must be a text, not an empty one")
    if lone_surrogate(value) >= 0:
        raise OptionError(f"{name} is {value!r:.60}, which has half of a surrogate pair; no file takes it")


def check_schema(text: str) -> None:
    """Check that a text is a JSON Schema as far as its JSON goes."""
    try:
        is_schema = isinstance(json.loads(text), dict)
    except ValueError:
        is_schema = False
    if not is_schema:
        raise OptionError(f"json_schema is {text!r:.60}; it must be a JSON Schema", now='Write json_schema={"type": "object", ...}.')


def model_path(model: object) -> str:
    """Check a model's path. Returns it as a text."""
    if not isinstance(model, Path):
        check_text("model", model)
    return str(model)


def _given(name: str, value: object, of: str) -> str:
    return f"{of}({name}={value!r:.60})" if of else f"{name}={value!r:.60}"


def as_tuple(values: object) -> tuple[Any, ...]:
    """A list as a tuple; anything else as it is, for a check that refuses it by its option's name."""
    return tuple(values) if isinstance(values, list | ItemsView) else values  # type: ignore[return-value]


def as_texts(values: object) -> Any:
    """Texts as a tuple; one alone may be given as it is."""
    return (values,) if isinstance(values, str) else as_tuple(values)


def as_pairs(values: object) -> Any:
    """A mapping, or None, as pairs; anything else as `as_tuple`."""
    return () if values is None else as_tuple(values.items() if isinstance(values, Mapping) else values)


def as_json(value: object) -> str:
    """A value as JSON; a text is taken for JSON already."""
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def number_or_column(name: str, given: Any) -> tuple[Any, str]:
    """A number for all samples and no column; or 1 and the name of the column that has each sample's."""
    if not isinstance(given, str):
        return given, ""
    check_text(name, given)
    return 1.0, given


def check_names(name: str, values: object, *, example: Sequence[str], of: str = "") -> tuple[str, ...]:
    """Check that a value is a list of texts; a single text is not one. Returns them."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if listed is None or not all(isinstance(value, str) for value in listed):
        now = f"Give a list: {name}={[values] if isinstance(values, str) else list(example)}."
        raise OptionError(f"{_given(name, values, of)}; it is a list of names", now=now)
    return tuple(listed)


def check_seconds(name: str, value: object) -> None:
    """Check that a value is a number of seconds above 0, or None: no limit."""
    if value is not None:
        check_number(name, value, above=0)


def check_instance(name: str, value: object, kind: type, instead: str, *, or_none: bool = True) -> None:
    """Check that a value is an instance of this class."""
    if not (isinstance(value, kind) or (or_none and value is None)):
        raise OptionError(f"{name}={value!r:.60} is no {kind.__name__}", now=f"Write {instead}.")


LATER = {"later": True}
"""Metadata of a field that its class did not have in an earlier release: a fingerprint leaves it out at its default."""


@dataclass(frozen=True)
class Lora:
    """LoRA: train low-rank adapters of linear layers instead of their weights: W + alpha / rank * B A.

    Source:
        Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    """The last part of the names of layers (`q_proj`); none: every linear layer but the head."""

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_number("alpha", self.alpha, above=0)
        targets: object = self.targets
        one = isinstance(targets, str)
        object.__setattr__(self, "targets", check_names("targets", (targets,) if one else targets, example=("q_proj", "v_proj")))


@dataclass(frozen=True)
class Balance:
    """Keep the experts of a mixture evenly loaded in each update: `Policy(path, balance=Balance(loss=1e-3))`.

    Source:
        `m2flow.engines.models.routing.Balanced`, with the equations.
    """

    loss: float = 0.0
    """Weight of the balance loss of each sequence, which is k (experts of a token) where all experts have equally many tokens."""
    z_loss: float = 0.0
    """Weight of the mean square of the routers' log-sum-exp, which keeps logits small."""
    bias_step: float = 0.0
    """How far an optimiser step moves the bias of each expert towards even loads; of models whose routers have one for the choice alone."""

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in given.items():
            check_number(name, value, low=0)
        if not any(given.values()):
            raise OptionError("Balance() balances nothing", now="Write Balance(loss=1e-3), or give z_loss or bias_step.")


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations become the text that a model sees."""

    system: str = ""
    """The system message of conversations that bring none."""
    template: str = ""
    """A Jinja template; empty: the tokenizer's own."""
    arguments: str = "{}"
    """JSON: further variables of the template, as `{"enable_thinking": false}`."""
    tools: str = "[]"
    """JSON: descriptions of the tools that the template presents."""

    @classmethod
    def of(cls, system: object, template: object, arguments: object, tools: object) -> ChatTemplate:
        """Check what a flow gives. `template` may be the path of a file.

        Raises:
            OptionError: something is not what its name says.
        """
        for name, value in (("system", system), ("chat_template", template)):
            if value is not None and not (name == "chat_template" and isinstance(value, Path)):
                check_text(name, value)
        if isinstance(template, Path) or (isinstance(template, str) and template.endswith(".jinja")):
            try:
                template = Path(template).expanduser().read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(f"chat_template={str(template)!r} can't be read: {error}", now="Give a readable file.") from None
        if arguments is not None and not (isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments)):
            raise OptionError(
                f"chat_template_kwargs is {arguments!r:.60}; it must map names to values",
                now='Write chat_template_kwargs={"enable_thinking": False}.',
            )
        if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
            raise OptionError(f"tools is {tools!r:.60}; it must be a list of JSON descriptions of functions")
        texts = {"chat_template_kwargs": dict(arguments or {}), "tools": list(tools or ())}
        try:
            written = {name: json.dumps(value, sort_keys=name != "tools") for name, value in texts.items()}
        except (TypeError, ValueError) as error:
            raise OptionError(f"chat_template_kwargs and tools must be what JSON can say: {error}") from None
        return cls(str(system or ""), str(template or ""), written["chat_template_kwargs"], written["tools"])


@dataclass(frozen=True)
class Model:
    """A model: where it is loaded from, in which dtype, with which head."""

    path: str
    """A Hugging Face model directory (config.json, tokenizer.json, *.safetensors), a .gguf file, which is dequantised, or a name of the
    Hugging Face hub (`Qwen/Qwen2.5-0.5B-Instruct`), if there is no such directory."""
    init: Init = "pretrained"
    """`random` needs only config.json and the tokenizer; the weights are drawn from `seed`."""
    seed: int = 0
    dtype: Dtype = "float32"
    chat: bool = False
    """Put each prompt that is a text through the chat template, as a user's message. One of messages always is."""
    head: Head = "lm"
    """What the model gives: the next token, a value of each token (a critic), or a score of the whole (a reward model)."""
    is_policy: bool = True
    """Whether the flow can generate from it; False for a reference, a critic or a reward model."""
    rollout_dtype: Dtype | None = None
    """Dtype of the weights in rollout engines, rounded from `dtype`; None: the same."""
    lora: Lora | None = None
    """Train these adapters; None: train all weights."""
    is_frozen: bool = False
    """Nothing in the flow ever changes its weights."""
    template: ChatTemplate = ChatTemplate()
    revision: str | None = field(default=None, metadata=LATER)
    """Branch, tag or commit of a model of the hub; None: its main branch, as far as the cache has none."""
    routing: Routing | None = field(default=None, metadata=LATER)
    """Whose choice of experts the trainer of a mixture replays."""
    balance: Balance | None = field(default=None, metadata=LATER)
    """What keeps the experts of a mixture evenly loaded in updates."""

    def __post_init__(self) -> None:
        check_instance("balance", self.balance, Balance, "Balance(loss=1e-3)")
        if self.balance is not None and self.balance.bias_step and self.lora is not None:
            raise OptionError("bias_step moves weights below adapters, which stay as they are", now="Leave bias_step or lora out.")
        if self.routing is not None:
            check_choice("replay_routing", self.routing, Routing)
        if self.revision is not None:
            check_text("revision", self.revision)
        check_choice("init", self.init, Init)
        check_choice("dtype", self.dtype, Dtype)
        check_flag("chat", self.chat)
        if self.rollout_dtype is not None:
            check_choice("rollout_dtype", self.rollout_dtype, Dtype)
        check_instance("lora", self.lora, Lora, "Lora(rank=16)")


_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_HUB_S = 30.0
"""Seconds that the hub may take for its first answer."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def is_of_hub(path: str) -> bool:
    """Whether this names a model of the Hugging Face hub: OWNER/NAME, and no directory or file is there."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.startswith(".") and not Path(path).expanduser().exists()


def hub_directory(model: Model, *, with_weights: bool) -> Path:
    """Find a model of the hub in huggingface_hub's cache; download what is missing, with a progress bar, where there is a network.

    Args:
        with_weights: whether the weights are needed, too. Without them config and tokenizer are downloaded; but weights that are
            missing are an error here too where the hub can't be reached.
    Raises:
        ModelError: files are missing that can't be had.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    found, why = in_cache(model), ""
    if found is None or missing_files(found, with_weights=model.init == "pretrained"):
        try:
            HfApi().model_info(model.path, revision=model.revision, timeout=_HUB_S)  # snapshot_download is content with what it has.
            patterns = [*_SMALL_FILES, *(["*.safetensors"] if with_weights and model.init == "pretrained" else [])]
            found = Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
            is_whole = not missing_files(found, with_weights=with_weights and model.init == "pretrained")
        except Exception as error:  # The package's own kinds of errors, and those of what it downloads with.
            found, is_whole, why = in_cache(model), False, f": {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
        if not is_whole:
            at = f" at {model.revision}" if model.revision else ""
            lacking = f"lacks {', '.join(missing_files(found, with_weights=model.init == 'pretrained'))}" if found else "is not"
            raise ModelError(
                f"{model.path} is no directory, and the hub's model of that name{at} {lacking} in the cache at {constants.HF_HUB_CACHE}; "
                f"the hub {f'could not be asked{why}' if why else 'does not have it either'}",
                now=f"Where there is a network: hf download {model.path}{f' --revision {model.revision}' if model.revision else ''}. "
                "Without one, give a directory: Policy('/a/directory'), with config.json, tokenizer.json and *.safetensors copied from "
                "a machine that has them (hf download --local-dir), or a copied cache, where HF_HOME says.",
            )
    assert found is not None
    return found


def in_cache(model: Model) -> Path | None:
    """Where huggingface_hub's cache has a model of the hub; None: nowhere."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except (OSError, ValueError):  # Nothing of it is there, or it is no name of a model.
        return None


def missing_files(directory: Path, *, with_weights: bool) -> list[str]:
    """Files that a model's directory lacks: config, tokenizer, and with weights the shards that its index names."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    missing += [] if any((directory / name).is_file() for name in _TOKENIZERS) else ["tokenizer.json"]
    index = directory / "model.safetensors.index.json"
    if not with_weights or (directory / "model.safetensors").is_file():
        return missing
    if not index.is_file():
        return missing if any(directory.glob("*.safetensors")) else [*missing, "model.safetensors"]
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return missing + [name for name in shards if not (directory / name).is_file()]


_COLDEST, _HOTTEST = 1e-3, 1e3
"""Bounds of the temperature, so that no logit overflows float32 when divided by it."""
_LEAST_PENALTY, _LARGEST_BIAS = 1e-2, 1e9

EpisodeFailure = Literal[
    "raised", "invalid", "timed_out", "turn_timed_out", "tool_failed", "too_many_turns", "too_many_conversations", "history_rewritten",
    "lost", "diverged", "unknown_speaker", "no_reward",
]  # fmt: skip
"""How an episode failed: the agent raised; it asked for what can't be, or returned no finite number; it, a turn or a tool took too long or
broke; it asked for more turns or conversations than it may have, or for one who does not speak in the rollout; the chat template rewrites
what was said; a tool that may not run twice had begun when the worker was lost; it diverged when repeated; no step had a reward."""

History = Literal["append", "refuse", "fork"]
"""What becomes of a conversation whose chat template writes the model's earlier turns anew."""


@dataclass(frozen=True)
class Episodes:
    """Bounds of the episodes of a rollout."""

    max_turns: int
    """Turns of the model."""
    timeout_s: float | None = None
    """Seconds that an episode may take."""
    turn_timeout_s: float | None = None
    """Seconds that a turn of the model may take."""
    history: History = "append"
    """Where a chat template would write earlier turns anew: keep their tokens, refuse to go on, or go on in a sequence written anew."""
    max_conversations: int = field(default=1, metadata=LATER)
    """Conversations in which the model speaks; each of the speakers likewise."""
    speakers: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)
    """Others that speak in the episodes: the name by which the agent knows each, and its role."""
    drawn_by: tuple[tuple[str, Sampling], ...] = field(default=(), metadata=LATER)
    """Name of each speaker whose turns are not drawn as the rollout's, and how they are."""

    def __post_init__(self) -> None:
        check_count("max_turns", self.max_turns)
        check_count("max_conversations", self.max_conversations)
        check_seconds("timeout_s", self.timeout_s)
        check_seconds("turn_timeout_s", self.turn_timeout_s)
        check_choice("history", self.history, History)

    @property
    def shown(self) -> dict[str, object]:
        """What a plan says of them."""
        several = {"max_conversations": self.max_conversations} if self.max_conversations > 1 else {}
        speakers: dict[str, object] = {"speakers": dict(self.speakers)} if self.speakers else {}
        speakers |= {f"{name}_temperature": own.temperature for name, own in self.drawn_by}
        return {"max_turns": self.max_turns, **several, **speakers, **({"history": "fork"} if self.history == "fork" else {})}

    @property
    def has_sequences(self) -> bool:
        """Whether what one role says in an episode may be several sequences, each of which a model reads by itself."""
        return self.max_conversations > 1 or self.history == "fork"


def longest_response(options: Mapping[str, object]) -> int:
    """Tokens of a sample of a call with these options beside its prompt, at most; without those of sequences that go on written anew
    (`history="fork"`). 0: it generates nothing."""
    sampling, bounds = options.get("sampling"), options.get("episodes")
    if not isinstance(sampling, Sampling):
        return 0
    return sampling.max_new_tokens * (bounds.max_conversations * (1 + len(bounds.speakers)) if isinstance(bounds, Episodes) else 1)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a response."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest that have this share of the probability between them. 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_new_tokens: int = 0
    """No end-of-sequence token is sampled before so many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token."""
    stop: tuple[str, ...] = field(default=(), metadata=LATER)
    """A response ends with the token that completes one of these texts, as soon as it has `min_new_tokens`."""
    include_stop: bool = field(default=False, metadata=LATER)
    """Whether the response's text includes the stop text. Its tokens always do: they are what was sampled."""
    ignore_eos: bool = field(default=False, metadata=LATER)
    """The end-of-sequence token ends no response; only stop texts and tokens, and the length do."""
    min_p: float = field(default=0.0, metadata=LATER)
    """Tokens less likely than this share of the likeliest are not drawn, after top-k and top-p. 0 is off."""
    repetition_penalty: float = field(default=1.0, metadata=LATER)
    """Logits of tokens that prompt or response have are divided by this if positive, else multiplied. 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), metadata=LATER)
    """Token and what is added to its logit, before the penalty."""
    regex: str = field(default="", metadata=LATER)
    """What the whole response matches; at most one of this and the next two. Empty is off."""
    json_schema: str = field(default="", metadata=LATER)
    """A JSON Schema, as JSON, of which the response is an instance."""
    grammar: str = field(default="", metadata=LATER)
    """A grammar that the response is a sentence of, in the form of llama.cpp (GBNF) or Lark."""
    sampling_mask: bool = field(default=False, metadata=LATER)
    """Record which tokens each one was drawn from; its log-probability is that among these, for the trainer too."""
    temperature_of: str = field(default="", metadata=LATER)
    """A column of the prompts that has each sample's temperature, in place of `temperature`. Engines get that one."""

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        check_number("temperature", self.temperature, low=0, high=_HOTTEST)
        if 0 < self.temperature < _COLDEST:
            raise OptionError(f"temperature is {self.temperature}; it must be 0 (greedy), or {_COLDEST} or more: logits are divided by it")
        check_number("top_p", self.top_p, above=0, high=1)
        check_count("top_k", self.top_k, least=0)
        check_count("min_new_tokens", self.min_new_tokens, least=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(f"min_new_tokens is {self.min_new_tokens}; it must lie in 0..max_new_tokens ({self.max_new_tokens})")
        tokens: object = self.stop_token_ids
        if not isinstance(tokens, tuple):
            raise OptionError(f"stop_token_ids is {tokens!r:.60}; it must be a tuple of whole numbers", now="Write stop_token_ids=(2,).")
        for token in tokens:
            check_count("each of stop_token_ids", token, least=0)
        self._check_stop()
        for name in ("include_stop", "ignore_eos", "sampling_mask"):
            check_flag(name, getattr(self, name))
        check_number("min_p", self.min_p, low=0, high=1)
        check_number("repetition_penalty", self.repetition_penalty, low=_LEAST_PENALTY, high=1 / _LEAST_PENALTY)
        self._check_bias()
        self._check_constraint()
        if self.temperature_of != "":
            check_text("temperature_of", self.temperature_of)

    @property
    def is_constrained(self) -> bool:
        return bool(self.regex or self.json_schema or self.grammar)

    def _check_constraint(self) -> None:
        given = [name for name in ("regex", "json_schema", "grammar") if getattr(self, name) != ""]
        for name in given:
            check_text(name, getattr(self, name))
        if self.json_schema:
            check_schema(self.json_schema)
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} are given, and a response has one constraint", now="Write both as one grammar=.")
        if given and (self.ignore_eos or self.min_new_tokens):
            other = "ignore_eos" if self.ignore_eos else "min_new_tokens"
            raise OptionError(f"{given[0]} ends a response where it is whole, and {other} would not", now=f"Leave {other} out.")

    def _check_stop(self) -> None:
        stop: object = self.stop
        if not isinstance(stop, tuple) or not all(isinstance(text, str) and text and lone_surrogate(text) < 0 for text in stop):
            raise OptionError(f"stop is {stop!r:.60}; it must be texts that are not empty", now='Write stop=["\\n\\n"].')
        if any("\ufffd" in text for text in stop):
            raise OptionError(f"stop is {stop!r:.60}; U+FFFD is what stands in a text for tokens that are none")

    def _check_bias(self) -> None:
        bias: object = self.logit_bias
        if not isinstance(bias, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
            raise OptionError(f"logit_bias is {bias!r:.60}; it must map tokens to numbers", now="Write logit_bias={13: -100.0}.")
        for token, added in bias:
            check_count("each token of logit_bias", token, least=0)
            check_number("each number of logit_bias", added, low=-_LARGEST_BIAS, high=_LARGEST_BIAS)
        if len({token for token, _ in bias}) < len(bias):
            raise OptionError(f"logit_bias is {bias!r:.60}, which has a token twice", now="Give each token one bias.")


Schedule = Literal["constant", "linear", "cosine"]
_SMALLEST_EPS = 1e-37
"""Smaller ones are 0 in float32, and a weight without gradient then becomes 0 / 0."""
_LARGEST_BETA = 1 - 2**-24
"""The largest number below 1 that is not 1 in float32."""


class _Scheduled:
    """What all optimisers have: a learning rate with warm-up and schedule, decay of weights, and a bound on the gradient's norm."""

    lr: float
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    schedule: Schedule
    total_steps: int
    steps_of: Literal["optimizer", "flow"] | None
    log_layers: bool
    at: int | None

    def __post_init__(self) -> None:
        check_flag("log_layers", self.log_layers)
        check_number("lr", self.lr, low=0)
        check_number("weight_decay", self.weight_decay, low=0)
        if self.lr * self.weight_decay > 1:
            raise OptionError(f"lr * weight_decay is {self.lr * self.weight_decay:g}; above 1 a step turns the signs of all weights")
        check_number("max_grad_norm", self.max_grad_norm, low=0)
        check_count("warmup_steps", self.warmup_steps, least=0)
        check_count("total_steps", self.total_steps, least=0)
        check_choice("schedule", self.schedule, Schedule)
        if self.steps_of is not None:
            check_choice("steps_of", self.steps_of, ("optimizer", "flow"))
        if self.at is not None:
            check_count("at", self.at, least=0)
        if self.schedule == "constant":
            return
        if self.total_steps <= self.warmup_steps and not (self.total_steps == 0 and self.counts_flow_steps):
            raise OptionError(
                f"schedule={self.schedule!r} needs total_steps above warmup_steps, got {self.total_steps} and {self.warmup_steps}",
                now="Leave total_steps and steps_of out to have the schedule end with the run.",
            )

    @property
    def counts_flow_steps(self) -> bool:
        """Whether the schedule counts the steps of the flow's loop, not the optimiser's."""
        return self.steps_of == "flow" or (self.steps_of is None and self.schedule != "constant" and self.total_steps == 0)

    def in_loop(self, num_steps: int) -> Self:
        """Adapt the schedule to a loop of so many steps: it ends with the loop, unless `total_steps` says otherwise.

        Raises:
            OptionError: the warm-up is as long as that.
        """
        total_steps = self.total_steps or (0 if self.schedule == "constant" else num_steps)
        if self.schedule != "constant" and total_steps <= self.warmup_steps:
            raise OptionError(f"warmup_steps is {self.warmup_steps}, and the loop that the schedule is for has {num_steps} steps")
        found: Self = replace(cast(Any, self), total_steps=total_steps, steps_of="flow")
        return found

    @property
    def state_key(self) -> Self:
        """Stands for all that share moments: they differ in `lr` and `max_grad_norm` alone, and their rates count no steps of theirs."""
        is_counted = (self.warmup_steps or self.schedule != "constant") and not self.counts_flow_steps
        found: Self = self if is_counted else replace(cast(Any, self), lr=0.0, max_grad_norm=0.0)
        return found

    def rate(self, num_steps: int) -> float:
        """The learning rate of the optimiser step that follows `num_steps` earlier ones; t is that number, or the flow's step `at`.

            t < warmup_steps:  lr * (t + 1) / warmup_steps
            else, with x = (t - warmup_steps) / (total_steps - warmup_steps):
            constant lr, linear lr * (1 - x), cosine lr * (1 + cos(pi x)) / 2; zero from total_steps on

        >>> [AdamW(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6).rate(t) for t in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        t = num_steps if self.at is None else self.at
        if t < self.warmup_steps:
            return self.lr * (t + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        x = min(1.0, (t - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1))
        return self.lr * (1 - x if self.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2)


@dataclass(frozen=True)
class WeightGroup:
    """Weights of a model that an optimiser treats differently.

        AdamW(1e-5, weight_decay=0.1, groups=[WeightGroup("*norm*", weight_decay=0)])

    A weight belongs to the first group whose pattern its name matches, and to none otherwise. A pattern that no trained weight matches is
    an error at the first step.
    """

    names: str
    """A pattern of names as in the module (`model.layers.0.mlp.gate.weight`), with `*` and `?`."""
    lr_scale: float = 1.0
    """Times the rate of the others, through warm-up and schedule. 0 leaves the weights as they are."""
    weight_decay: float | None = None
    """None: that of the others."""

    def __post_init__(self) -> None:
        check_text("names", self.names)
        check_number("lr_scale", self.lr_scale, low=0)
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay, low=0)


@dataclass(frozen=True)
class AdamW(_Scheduled):
    """The optimiser: Adam with decoupled weight decay, warm-up, and a schedule. Those of one `state_key` in a flow share a state.

    Source:
        Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    lr: float = 1e-6
    """The learning rate, about what a step moves each weight by; before warm-up and schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    """What a step keeps of the means of the gradient and of its square, as shares."""
    eps: float = 1e-8
    """Added to the root of the squares' mean, by which the gradient's is divided."""
    weight_decay: float = 0.0
    """Times `lr`, the share of itself that a weight loses in a step."""
    max_grad_norm: float = 1.0
    """The gradient's global 2-norm is scaled down to this. 0 is off."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly to `lr`."""
    schedule: Schedule = "constant"
    """After the warm-up; `linear` and `cosine` fall to zero at `total_steps`."""
    total_steps: int = 0
    """0: the length of the loop over `steps(...)` that the update is in; then both numbers count the flow's steps."""
    steps_of: Literal["optimizer", "flow"] | None = None
    """What `warmup_steps` and `total_steps` count: steps of the optimiser, of which an update makes one for each mini-batch and epoch; or
    steps of the flow's loop, whose updates have one rate each. None: the optimiser's, unless `total_steps` is left out."""
    groups: Sequence[WeightGroup] = field(default=(), metadata=LATER)
    """Weights with a rate or decay of their own. Trainers `embedded` and `fsdp` have them."""
    log_layers: bool = field(default=False, repr=False, compare=False)
    """Updates report `grad_norm/GROUP` (as `grad_norm`) and `update_ratio/GROUP` (the 2-norm of what a step adds to the weights, over
    theirs) for each group of weights: `layers.0` and so on, `embeddings`, `head` and `rest`. A step then keeps a copy of its weights."""
    at: int | None = field(default=None, repr=False, compare=False)
    """Set by m2flow for an update whose schedule counts the flow's steps: the step of the loop that it is in."""

    def __post_init__(self) -> None:
        _check_betas(self.betas, self.eps)
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        super().__post_init__()


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW whose two means take one byte each for a weight in place of four, with a scale for each 256 of them.

    Tensors of fewer than 4096 weights, or of a number that is no multiple of 256, embeddings and the head keep theirs in float32. A step is
    at most as long as AdamW's can be. (A weight whose gradients are a thousandth of others in its block moves too far.) The trainer
    `embedded` has it, with `pip install 'm2flow[8bit]'`. `lr`, `betas`, `eps`, `weight_decay`, `max_grad_norm`, `warmup_steps`,
    `schedule`, `total_steps`, `steps_of`, `groups`, `log_layers` and `at` are as of `AdamW`.

    Source:
        Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, as the package torchao has it.
    """


@dataclass(frozen=True)
class Muon(_Scheduled):
    """The optimiser whose steps on matrices are orthogonal, so that no direction of a matrix moves further than another.

        m = momentum m + g,    o = the orthogonal matrix nearest to g + momentum m
        w = w - lr (0.2 sqrt(max(rows, columns)) o + weight_decay w)

    A step has the size of AdamW's, so AdamW's learning rates carry over. Matrices are those of the model's layers, of mixtures one for each
    expert; other weights (embeddings, heads, norms, biases) are stepped by AdamW with `betas` and `eps`. The nearest orthogonal matrix is
    found by five Newton-Schulz iterations in float32, whose singular values end between 0.7 and 1.2 or so. The state is one number for a
    weight of a matrix, where AdamW has two. Ranks that hold parts of the weights gather each matrix whole, one after the other.
    `max_grad_norm`, `warmup_steps`, `schedule`, `total_steps`, `steps_of`, `log_layers` and `at` are as of `AdamW`.

    Source:
        Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", https://kellerjordan.github.io/posts/muon, with its
        coefficients; the size of steps and the decay: Liu et al. 2025, "Muon is scalable for LLM training", arXiv:2502.16982, section 2.2.
    """

    lr: float = 1e-6
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int = 0
    steps_of: Literal["optimizer", "flow"] | None = None
    log_layers: bool = field(default=False, repr=False, compare=False)
    at: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, low=0, high=_LARGEST_BETA)
        _check_betas(self.betas, self.eps)
        super().__post_init__()


@dataclass(frozen=True)
class SGD(_Scheduled):
    """The optimiser without moments: a step along the gradient, with momentum if it is asked for; without it there is no state at all.

        g = g + weight_decay w,    m = momentum m + g,    w = w - lr m

    `max_grad_norm`, `warmup_steps`, `schedule`, `total_steps`, `steps_of`, `groups`, `log_layers` and `at` are as of `AdamW`.

    Source:
        torch.optim.SGD, whose equations these are: the decay goes through the momentum, and is that of Adam, not of AdamW.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int = 0
    steps_of: Literal["optimizer", "flow"] | None = None
    groups: Sequence[WeightGroup] = field(default=(), metadata=LATER)
    log_layers: bool = field(default=False, repr=False, compare=False)
    at: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, low=0, high=_LARGEST_BETA)
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        super().__post_init__()


Optimizer = AdamW | Muon | SGD
OPTIMIZERS: dict[str, type[Optimizer]] = {one.__name__: one for one in (AdamW, AdamW8bit, Muon, SGD)}


def check_optimizer(optimizer: object) -> None:
    """Check that a value is an optimiser."""
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"optimizer={optimizer!r:.60} is no optimizer", now="Pass AdamW(lr=...), AdamW8bit(lr=...), Muon(lr=...) or SGD(lr=...)."
        )


def _checked_groups(groups: object) -> tuple[WeightGroup, ...]:
    found = as_tuple(groups)
    if not isinstance(found, tuple) or not all(isinstance(one, WeightGroup) for one in found):
        raise OptionError(
            f"groups is {groups!r:.60}; it is a list of WeightGroup", now='Write groups=[WeightGroup("*norm*", weight_decay=0)].'
        )
    return found


def _check_betas(betas: object, eps: object) -> None:
    if not isinstance(betas, tuple) or len(betas) != 2:
        raise OptionError(f"betas is {betas!r:.60}; it must be a pair of numbers", now="Write betas=(0.9, 0.999).")
    for beta in betas:
        check_number("each of betas", beta, low=0, high=_LARGEST_BETA)
    check_number("eps", eps, low=_SMALLEST_EPS)


@dataclass(frozen=True)
class Counts:
    """Counts over a whole mini-batch, however it is cut: what a loss's sum may be divided by."""

    num_tokens: int
    """Under the loss mask."""
    num_sequences: int
    num_groups: int
    """Prompts that the sequences answer."""


@dataclass(frozen=True)
class PerSequence:
    """A denominator: the sum over a sequence is divided by a constant, and the mean is over sequences, so length changes no token's weight.

    Source:
        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2, with the most tokens that a response may have as the constant.

    >>> PerSequence(512)(Counts(num_tokens=700, num_sequences=8, num_groups=2))
    4096
    """

    tokens: float

    def __post_init__(self) -> None:
        check_number("tokens", self.tokens, above=0)

    def __call__(self, counts: Counts) -> float:
        return self.tokens * counts.num_sequences


@dataclass(frozen=True)
class Advantage:
    """A function that turns the rewards of a group into advantages, with its options: `pass_at_k(4)`."""

    name: str
    options: tuple[tuple[str, float], ...] = ()
    by_conversation: bool = field(default=False, metadata=LATER)
    """Whether an episode's conversations, rather than episodes, are compared."""

    @property
    def least_responses(self) -> int:
        """Responses to a prompt that it compares, at least."""
        return max(2, int(dict(self.options).get("k", 2)))

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        own = f"{self.name}({options})" if options else self.name
        return f"by_conversation({own})" if self.by_conversation else own


def pass_at_k(k: int) -> Advantage:
    """Advantages for the reward of the best of k samples: `update(advantages=pass_at_k(4))`, for rewards that are 0 or 1.

    Args:
        k: samples of which one must be right, 1 to the size of a group. One that has lost samples and has fewer left teaches nothing.
    Source:
        Chen et al. 2025, arXiv:2508.10751. See `m2flow.algorithms.advantages.pass_at_k`.
    """
    check_count("k", k)
    return Advantage("pass_at_k", (("k", k),))


def gigpo(discount: float = 0.95, weight: float = 1.0) -> Advantage:
    """Advantages of the turns of episodes: of the episode in its group, and of each turn among those that began in the same state.

        policy.update(episodes, episodes.reward, advantages=gigpo())

    The state before a turn is what came since the one before it: the prompt, or what tools gave. What the model said is a turn.

    Args:
        discount: of the reward for each turn that comes after, from 0 to 1. weight: of the turns' own advantages, 0 or more.
    Source:
        Feng et al. 2025, arXiv:2505.10978. See `m2flow.algorithms.advantages.gigpo`.
    """
    check_number("discount", discount, low=0, high=1)
    check_number("weight", weight, low=0)
    return Advantage("gigpo", (("discount", discount), ("weight", weight)))


def by_conversation(advantages: str | Advantage = "grpo") -> Advantage:
    """Advantages of the conversations of episodes: each by its own reward, compared with those of its name in the group.

        policy.update(episodes, episodes.reward, advantages=by_conversation())      # the agent returned {"black": 1.0, "white": -1.0}

    A conversation without a reward of its own goes by that of the one that it was forked from.

    Args:
        advantages: what compares them, of those that look at one group: `grpo`, `rloo`, ..., `pass_at_k(4)`.
    """
    if not isinstance(advantages, Advantage):
        check_choice("advantages", advantages, GroupAdvantage, of="by_conversation")
        advantages = Advantage(advantages)
    if advantages.by_conversation or advantages.name == "gigpo":
        raise OptionError(f"by_conversation({advantages}): it compares turns, or conversations, itself", now="Name a function of a group.")
    return replace(advantages, by_conversation=True)


@dataclass(frozen=True)
class Correction:
    """Correct an update for samples that another engine or older weights drew: `update(correction=Correction(upper=2.0))`.

    The trainer computes the samples' log-probabilities before the update, a forward pass that the plan shows. A loss takes them for its
    `behaviour_logprobs`, so it clips around the weights before the update; and each token's term, with any penalty in it, is weighted by
    their ratio to the rollout's, bounded. Equations and metrics are at `m2flow.algorithms.losses.correction_weights`; the update reports
    quantiles of the ratios of tokens, too: `rollout_ratio_p01`, `rollout_ratio_p50` and `rollout_ratio_p99`.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: the token's, the product over its response, or the geometric mean over it."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of a ratio outside the bounds: the bound, or 0. Denominators still count a masked token."""
    upper: float | Sequence[float] = 2.0
    """Bound on the ratio, above 0. A sequence has one for each version age: `upper=(4.0, 2.0)` is 4 for tokens of the weights that the
    update begins with, 2 for all older ones. Of a response, with a level other than token, its oldest token under the loss mask counts."""
    lower: float | Sequence[float] = 0.0
    """From 0 to `upper`, for each age; one number, or a sequence as `upper`, of any length."""
    veto: float = 0.0
    """A response with a token whose ratio is below this counts nothing. 0 is off; below 1."""

    def __post_init__(self) -> None:
        check_choice("level", self.level, ("token", "sequence", "geometric"))
        check_choice("mode", self.mode, ("truncate", "mask"))
        check_number("veto", self.veto, low=0, high=1)
        for name in ("upper", "lower"):
            value: object = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(value))
                if not value:
                    raise OptionError(f"{name} is empty; it must be a number, or one for each version age, from 0 on")
        of_age = self.bounds
        for age, (lower, upper) in enumerate(of_age):
            where = f" of version age {age}" * (len(of_age) > 1)
            check_number(f"upper{where}", upper, above=0)
            check_number(f"lower{where}", lower, low=0, high=upper)

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Lower and upper for each version age from 0 on; the last are for all older ages, too."""
        lower, upper = (one if isinstance(one, tuple) else (one,) for one in (self.lower, self.upper))
        return tuple((lower[min(i, len(lower) - 1)], upper[min(i, len(upper) - 1)]) for i in range(max(len(lower), len(upper))))

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that it is computed from."""
        return (PROXIMAL, "logprobs", VERSION_AGES) if len(self.bounds) > 1 else (PROXIMAL, "logprobs")


TOP_LOGPROBS = "top_logprobs"
"""Output of a language model: log-probabilities of the tokens of `REFERENCE_TOP_IDS`, and of all others together."""
REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS = "reference_top_ids", "reference_top_logprobs"
"""Columns of `Reference.logprobs(top_k=K)`, ragged over the tokens under the loss mask: the K likeliest tokens, int32 [T, K], and the
log-probabilities of these and of all others together, float32 [T, K + 1]."""

HEAD_OUTPUTS = {"lm": frozenset({"logprobs", "entropy", TOP_LOGPROBS}), "value": frozenset({"values"})}
"""Head of a trained model -> what it computes for a loss, with gradient."""

PROXIMAL = "proximal_logprobs"
"""Column of the trainer's own log-probabilities before an update."""

VERSION_AGES = "version_ages"
"""Column of updates that need it: by how many versions the weights that sampled a token are older than those that are updated, int64."""

COMPUTED = frozenset({"sequence_lengths", "sequence_ids", "group_ids", "random_numbers", "behaviour_logprobs"}).union(
    *HEAD_OUTPUTS.values()
)
"""Inputs of a loss that the engine computes itself, on samples with behaviour log-probabilities; anything else is a column."""


@dataclass(frozen=True)
class Loss:
    """The declaration of a loss: its function, its inputs, and what its sum is divided by.

    The function gets each of `needs` as a keyword: a flat tensor [T] over the tokens that the loss mask selects, samples one
    after the other in a micro-batch, and returns per-token terms [T], or those and a dict of per-token metrics [T]. Sums over
    tokens are gradients' sums; the division by the denominator of the whole mini-batch comes at its end.
    """

    name: str
    function: str | object
    """`module:name`, or a callable."""
    needs: tuple[str, ...]
    """Names of the tensors that it reads: of `logprobs`, `entropy`, `top_logprobs` ([T, K + 1]) and `values` of a critic, all with
    gradient, `behaviour_logprobs`, `reference_logprobs`, `reference_top_logprobs` (of a reference with `top_k`), `advantages`,
    `sequence_lengths` (of the sample that the token belongs to), `sequence_ids` (which sample of the tensors that is, from 0), `group_ids`
    (which group that is, from 0; a loss that needs them gets whole groups), `random_numbers` (from 0 to 1, by the token's sample and its
    place in that alone), and of per-token or per-sample columns."""
    denominator: Denominator | Callable[[Counts], float] = "tokens"
    """What the sum over a mini-batch is divided by: a count, or a function of the counts of the whole mini-batch."""
    options: tuple[tuple[str, float | int | str | bool], ...] = field(default=())
    """Further keywords."""
    correction: Correction | None = None
    """Weights for what another policy sampled; set by an update that has one."""

    @property
    def is_of_groups(self) -> bool:
        """Whether it looks at all samples of a group together or averages over groups, so that micro-batches have whole groups."""
        return "group_ids" in self.needs or self.denominator == "groups"

    def __post_init__(self) -> None:
        check_instance("correction", self.correction, Correction, "update(correction=Correction(upper=2.0))")
        check_text("name of the loss", self.name)
        if not callable(self.function) and not isinstance(self.function, str):
            raise OptionError(f"function={self.function!r:.60}; it must be a function, or its place as 'module:name'")
        check_names("needs", self.needs, example=("logprobs", "advantages"))
        if not callable(self.denominator):
            check_choice("denominator", self.denominator, Denominator, "or a function of the mini-batch's Counts")
        options: object = self.options
        if not isinstance(options, tuple) or not all(isinstance(one, tuple) and len(one) == 2 for one in options):
            raise OptionError(f"options={options!r:.60}; it must be a tuple of pairs", now="Write options=(('eps', 0.2),).")
