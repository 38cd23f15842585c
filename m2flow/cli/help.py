"""Implement `m2flow help`, and hold the order of the reference: which names are public, on which page each stands, and what is said of it.

docstrings of m2flow, m2flow.rewards, m2flow.errors --> TOPICS --> m2flow help NAME
fields of m2flow.spec, help of the commands                    --> docs/write_reference.py, the pages of the reference
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

import click
from pydantic import BaseModel

import m2flow
from m2flow import errors, rewards, spec
from m2flow.cli.main import cli
from m2flow.errors import OptionError, did_you_mean
from m2flow.macro.handles import Handle
from m2flow.macro.number import Number
from m2flow.rollout_scheduling.policies import POLICIES
from m2flow.rollout_scheduling.policy import SchedulingPolicy

# ---- what there is

TOPICS: dict[str, tuple[str, str]] = {
    "flows": ("Flows: the function, its steps, its own operations", "flow Flow steps log op Role call load_flow traceparent"),
    "roles": ("Roles: models and rewards of a flow", "Policy Reference Reward Critic RewardModel gae"),
    "agents": (
        "Agents: episodes of several turns, with tools",
        "agent Chat Turn EpisodeRows tool ToolCall endpoint mcp_tools EpisodeFailed",
    ),
    "data": ("Data: prompts, and which of them count", "Dataset informative pass_rate_between best_and_worst"),
    "results": ("Results: handles on what calls give", "Rows Scores Metrics Number concat join where"),
    "samples": ("Samples: what rewards and operations see", "Sample SampleId Finish Batch Sampling"),
    "evaluation": ("Evaluation: metrics, the best weights, early stop", "evaluate Best"),
    "training": (
        "Training: optimiser, adapters, advantages, losses",
        "AdamW AdamW8bit Muon SGD WeightGroup Lora Balance Correction pass_at_k gigpo by_conversation loss Loss Counts PerSequence "
        "sequence_mean sequence_sum "
        "ppo_clip gspo gspo_token gmpo cispo sapo dppo topr decoupled_ppo clip_cov kl_cov reinforce importance_reinforce opmd "
        "distill distill_top_k "
        "nll dpo ipo simpo kto bradley_terry process_reward clipped_value",
    ),
    "sandbox": ("Sandbox: a box for programs that nobody has read", "Sandbox"),
    "python": ("From Python: run, plan, simulate, and what they return", "run plan simulate open_run Run"),
    "rewards": (
        "Rewards off the shelf: m2flow.rewards",
        "ExactMatch RegexMatch MathAnswer Format JsonSchema Length Overlong Repetition Language UnitTests ReasoningGym LlmJudge Remote",
    ),
}
"""Topic -> its title, and its names in the order of their sections."""

ELSEWHERE: dict[str, str] = {
    "m2flow.environments.env": "Env",
    "m2flow.environments.turns": "play TurnEnv play_by_turns PettingZoo",
    "m2flow.environments.openenv": "OpenEnv",
    "m2flow.agents.verifiers_envs": "verifiers_rows verifiers_agent",
    "m2flow.environments.actor_critic": "Simulator Actor ActorCritic lanes episode_return",
    "m2flow.sandbox": "BlockingSandbox Result run_program",
    "m2flow.algorithms.shaping": "adaptive_kl_coef adaptive_entropy_coef",
}
"""Module -> its names that flows import from there. They are loaded when somebody asks."""

SINCE = "0.1.0"
"""The version since which everything is there that is not in `LATER`."""
LATER: dict[str, str] = {}
"""What came later -> its version: a name, a method (`Dataset.shard`), an option or a field of one (`Dataset.csv.stream`)."""

_OF_THE_TRACER = (
    "call check holder like maker mask metrics_of observe operand operate reduce ref result_of samples_of session source within"
)
"""Methods of handles and numbers that other modules of m2flow call, and no flow."""


def public(topic: str) -> dict[str, object]:
    """The names of a topic, with what they stand for."""
    module = rewards if topic == "rewards" else m2flow
    return {name: getattr(module, name) for name in TOPICS[topic][1].split()}


def specs() -> dict[str, type[BaseModel]]:
    """The sections of a cluster spec and of run settings by their names, the whole spec first."""
    found = [one for one in vars(spec).values() if inspect.isclass(one) and issubclass(one, BaseModel) and one.__module__ == spec.__name__]
    named = [one for one in found if not one.__name__.startswith("_")]
    return {one.__name__: one for one in sorted(named, key=lambda one: one is not spec.ClusterSpec)}


def commands() -> Iterator[click.Context]:
    """Every command as it is when it is called, those of groups after their group."""

    def below(name: str, command: click.Command, parent: click.Context | None) -> Iterator[click.Context]:
        settings = {**command.context_settings, "terminal_width": 120, "max_content_width": 120}
        context = click.Context(command, info_name=name, parent=parent, **settings)
        yield context
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                found = command.get_command(context, each)
                assert found is not None
                yield from below(each, found, context)

    return below("m2flow", cli, None)


def kinds_of_error(kind: type[errors.M2FlowError] = errors.M2FlowError, depth: int = 0) -> Iterator[tuple[int, type[errors.M2FlowError]]]:
    """Every error that m2flow raises on purpose, with its depth in the tree."""
    yield depth, kind
    for below in sorted(kind.__subclasses__(), key=lambda one: one.__name__):
        if below.__module__ == errors.__name__:
            yield from kinds_of_error(below, depth + 1)


# ---- what is said of it


def signature(name: str, value: object) -> str:
    """The call of a function or class: on one line if it is short, else a line for each parameter. Empty for what no flow makes itself."""
    if inspect.isclass(value) and issubclass(value, Enum | Handle | Number | errors.M2FlowError | BaseModel | Warning):
        return ""
    found = inspect.signature(value)  # type: ignore[arg-type]
    given, kinds = [], {one.kind for one in found.parameters.values()}
    for number, parameter in enumerate(found.parameters.values()):
        if number == 0 and parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in given and parameter.VAR_POSITIONAL not in kinds:
            given.append("*")
        given.append(_parameter(parameter))
    gives = "" if inspect.isclass(value) or found.return_annotation is found.empty else f" -> {_type(found.return_annotation)}"
    line = f"{name}({', '.join(given)}){gives}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {one},\n" for one in given) + f"){gives}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    type_ = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else _readable(repr(parameter.default))
    return f"{stars}{parameter.name}{type_}" + (f"{' = ' if type_ else '='}{default}" if default else "")


def _type(annotation: object) -> str:
    if isinstance(annotation, str):
        return _readable(annotation)
    return _readable(inspect.formatannotation(annotation))


def _readable(code: str) -> str:
    """A type or a value without modules and addresses, which say nothing to a reader."""
    plain = re.sub(r"<(?:function|object) ?([\w.]*)[^>]*>", r"\1", code)
    plain = re.sub(r"numpy\.ndarray\[tuple\[Any, \.\.\.\], numpy\.dtype\[numpy\.(\w+)\]\]", r"NDArray[\1]", plain)
    return re.sub(r"\b(?:m2flow|collections|typing|datetime)\.(?:\w+\.)*(?=\w)", "", plain)


def methods(kind: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that m2flow's own classes define."""
    for name in sorted(dir(kind)):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("m2flow"):
            continue
        if issubclass(kind, Handle | Number) and name in _OF_THE_TRACER.split():
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, property) or callable(getattr(kind, name)):
            yield name, member if isinstance(member, property) else getattr(kind, name)


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a dataclass or a spec, or a value of an enumeration."""

    name: str
    type: str
    default: str
    """As Python writes it; `required`, or nothing where it is computed."""
    meaning: str


def fields(kind: type) -> list[Field]:
    """The fields of a dataclass or a spec, or the values of an enumeration, each with what stands under it where it is declared."""
    said = documentation(kind)
    if issubclass(kind, Enum):
        return [Field(member.name, "", "", said.get(member.name, "")) for member in kind]
    if issubclass(kind, BaseModel):
        return [
            Field(name, _type(one.annotation), _default_of_model(kind, name), said.get(name, "")) for name, one in kind.model_fields.items()
        ]
    if dataclasses.is_dataclass(kind):
        public = [one for one in dataclasses.fields(kind) if not one.name.startswith("_")]
        return [Field(one.name, _type(one.type), _default_of_field(one), said.get(one.name, "")) for one in public]
    return []


def _default_of_model(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields[name]
    if field.is_required():
        return "required"
    return f"{type(field.default).__name__}()" if isinstance(field.default, BaseModel) else repr(field.default)


def _default_of_field(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "" if field.default_factory is not dataclasses.MISSING else "required"


def documentation(kind: type) -> dict[str, str]:
    """What stands under each field of a class."""
    return _documentation_of(kind.__module__)[kind.__qualname__]


@functools.cache
def _documentation_of(module: str) -> dict[str, dict[str, str]]:
    """What stands under the fields of each class of a module. The module is parsed once; `inspect.getsource` parses it for each class."""
    found: dict[str, dict[str, str]] = {}
    left = [("", ast.parse(inspect.getsource(sys.modules[module])).body)]
    while left:
        prefix, body = left.pop()
        for part in body:
            if isinstance(part, ast.ClassDef):
                found[prefix + part.name] = _under_fields(part.body)
                left.append((f"{prefix}{part.name}.", part.body))
    return found


def _under_fields(body: Sequence[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        names = [field.target] if isinstance(field, ast.AnnAssign) else field.targets if isinstance(field, ast.Assign) else []
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found |= {name.id: " ".join(below.value.value.split()) for name in names if isinstance(name, ast.Name)}
    return found


# ---- m2flow help


@click.command("help")
@click.argument("names", metavar="[NAME]...", nargs=-1)
def command(names: tuple[str, ...]) -> None:
    """Say what a name of m2flow means: a class or function, a method, a field of a spec, an error, a command or a topic.

    Without a name, the topics are listed. It is what the reference says (`make docs` writes that).

    \b
    Examples:
      m2flow help data
      m2flow help Policy.generate
      m2flow help rollout.max_running
      m2flow help simulate rollout
    """
    click.echo(help_of(" ".join(names)) if names else _overview())


def help_of(name: str) -> str:
    """The text of a name.

    Raises:
        OptionError: m2flow has no such name.
    """
    found = _texts()
    modules = "|".join(map(re.escape, ("m2flow.rewards", "m2flow.errors", "rewards", "errors", *ELSEWHERE, "m2flow")))
    plain = re.sub(rf"^({modules})[ .]", "", name)
    for key in (plain, *(key for key in found if key.lower() == plain.lower())):
        if key in found:
            return found[key]()
    raise OptionError(f"m2flow has no name {name!r}", now=_nearest(plain, found))


def _nearest(name: str, found: Mapping[str, functools.partial[str]]) -> str:
    """What an unknown name may be: a method, an option of a function or a command, or one that is written alike."""
    for what, keys in (
        ("It is", [key for key in found if key.endswith(f".{name}")]),
        ("It is an option of", [key for key, text in found.items() if name.lstrip("-").replace("-", "_") in _options(text)]),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            return f"{what} {', '.join(keys[:3])}{more}: m2flow help {keys[0]}."
    otherwise = "`m2flow help` lists the topics; docs/guide/glossary.md explains m2flow's words."
    return did_you_mean(name, found, otherwise, cutoff=0.7)


def _options(text: functools.partial[str]) -> set[str]:
    """The options of what a text is about."""
    of = text.args[-1]
    if isinstance(of, click.Context):
        return {option.name or "" for option in of.command.params if isinstance(option, click.Option)}
    is_called = text.func in (_text_of_name, _text_of_method) and not isinstance(of, property) and signature("", of)
    return set(inspect.signature(of).parameters) if is_called else set()


@functools.cache
def _texts() -> dict[str, functools.partial[str]]:
    """Every name that has help, with what makes its text. Where names are equal the first of these counts."""
    found: dict[str, functools.partial[str]] = {}

    def add(name: str, make: Callable[..., str], *of: object) -> None:
        found.setdefault(name, functools.partial(make, *of))

    for topic in TOPICS:
        for name, value in public(topic).items():
            add(name, _text_of_name, name, value)
            for method, member in methods(value) if inspect.isclass(value) else ():
                add(f"{name}.{method}", _text_of_method, f"{name}.{method}", member)
    for topic in TOPICS:
        add(topic, _text_of_topic, topic)
    for kind in (*(kind for _, kind in kinds_of_error()), *(one for one in vars(errors).values() if _is_warning(one))):
        add(kind.__name__, _text_of_name, kind.__name__, kind)
    for name, section in specs().items():
        add(name, _text_of_name, name, section)
    for path, field in (*_spec_fields(spec.ClusterSpec), *_spec_fields(spec.RunSettings)):
        add(path, _text_of_field, path, field)
    for context in commands():
        name = context.command_path.removeprefix("m2flow").strip()
        add(name, context.command.get_help, context)
        if found[name].func is _text_of_name:
            found[name] = functools.partial(_text_of_both, found[name], name)
    for name, policy in POLICIES.items():
        add(name, _text_of_policy, name, policy)
    for module, names in ELSEWHERE.items():
        for name in names.split():
            add(name, _text_of_elsewhere, f"{module}:{name}")
    return found


def _text_of_both(of_python: Callable[[], str], command: str) -> str:
    return f"{of_python().rstrip()}\n\nFor the command of this name: m2flow {command} --help"


def _is_warning(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Warning)


def _spec_fields(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, Field]]:
    """Every field of a spec and of its sections, by the path that a YAML file has it under."""
    for field in fields(section):
        yield f"{above}{field.name}", field
        inside = section.model_fields[field.name].annotation
        if inspect.isclass(inside) and issubclass(inside, BaseModel):
            yield from _spec_fields(inside, f"{above}{field.name}.")


def _overview() -> str:
    lines = []
    for topic, (title, names) in TOPICS.items():
        lines += [title, *textwrap.wrap(names, 100, initial_indent="  ", subsequent_indent="  "), f"  -> m2flow help {topic}", ""]
    return "\n".join(
        [*lines, "Likewise: a method, an error, a command, a field of a cluster spec or a run setting (rollout.max_running), a policy."]
    )


def _text_of_topic(topic: str) -> str:
    lines = [TOPICS[topic][0], ""]
    width = max(map(len, public(topic)))
    lines += [f"  {name:<{width}}  {first_line(value)}" for name, value in public(topic).items()]
    return "\n".join([*lines, "", "m2flow help NAME says more."])


def since(path: str, value: object) -> list[str]:
    """Since which version a name is there; of a method, options and fields only where they came later."""
    of = getattr(value, "fget", None) or value
    options = [
        *(inspect.signature(of).parameters if callable(of) and not _is_warning(of) else ()),
        *(one.name for one in (fields(of) if inspect.isclass(of) else ())),
    ]
    later = {name: LATER[f"{path}.{name}"] for name in options if f"{path}.{name}" in LATER}
    own = [f"Since {LATER.get(path, SINCE)}."] if "." not in path or path in LATER else []
    return [*own, *(f"`{name}` since {version}." for name, version in later.items())]


_SHARED = {"denominator": "as of `m2flow.loss`: what the sum of the loss's terms over a mini-batch is divided by."}
"""Options that several functions have alike, for those that say nothing of them."""


def docstring(value: object) -> str:
    """The docstring of a public name, with a line about shared options that it does not mention."""
    text = inspect.getdoc(value) or ""
    options = inspect.signature(value).parameters if callable(value) and not inspect.isclass(value) else ()
    added = [f"{name}: {meaning}" for name, meaning in _SHARED.items() if name in options and name not in text]
    return "\n\n".join([text, *added])


def first_line(value: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _text_of_name(name: str, value: object) -> str:
    lines = [signature(name, value) or name, "", docstring(value)]
    if not inspect.isclass(value):
        return "\n".join([*lines, "", *since(name, value)])
    found = fields(value)
    lines += ["", "Values:" if issubclass(value, Enum) else "Fields:"] if found else []
    for field in found:
        lines += [f"  {_line_of(field.name, field)}", *textwrap.wrap(field.meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    below = (
        []
        if issubclass(value, BaseModel | errors.M2FlowError | Warning)
        else [(f"{name}.{method}", member) for method, member in methods(value)]
    )
    if below:
        width = max(len(path) for path, _ in below)
        lines += [
            "",
            "Methods:",
            *(
                f"  {path:<{width}}  {'(a property) ' * isinstance(member, property)}{first_line(member)}".rstrip()
                for path, member in below
            ),
        ]
    return "\n".join([*lines, "", *since(name, value)])


def _text_of_elsewhere(place: str) -> str:
    module, _, name = place.partition(":")
    return f"from {module} import {name}\n\n{_text_of_name(name, pkgutil.resolve_name(place))}"


def _text_of_method(path: str, member: object) -> str:
    called = path if isinstance(member, property) else signature(path, member)
    later = since(path, member)
    return "\n".join([called, "", inspect.getdoc(member) or "", *([""] if later else []), *later])


def _text_of_policy(name: str, policy: type[SchedulingPolicy]) -> str:
    return f"{name}, a policy of rollout scheduling\n\n{inspect.getdoc(policy) or ''}"


def _text_of_field(path: str, field: Field) -> str:
    return "\n".join([_line_of(path, field), "", *textwrap.wrap(field.meaning, 110)])


def _line_of(name: str, field: Field) -> str:
    return name + (f": {field.type}" if field.type else "") + (f" = {field.default}" if field.default not in ("", "required") else "")
