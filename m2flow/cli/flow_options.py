"""Make commands whose options are their own and the parameters of the flow that they are given.

    m2flow run flows/grpo.py --num-steps 80      def grpo(num_steps: int = 80, ...)

The flow's file is imported before the options are parsed, since they depend on it. A parameter with the name of one of the command's own
options is given by `--set name=value`, and the help says so.
"""

from __future__ import annotations

import enum
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from m2flow.errors import OptionError, did_you_mean
from m2flow.macro.flow import Flow, Parameter, load_flow

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # Generic in newer releases of click only.
else:
    ParamType = click.ParamType

SEED = click.IntRange(min=0, max=2**63 - 1)
"""The type of `--seed`. Python's generators take a negative seed for the positive one."""

_PREFIX = "flow__"
"""Prefix of the flow's parameters in click, so that they can't collide with the command's own."""
_FLOW = "m2flow.flow"


class FlowCommand(click.Command):
    """A command that calls its function with `flow`, the flow's given `options`, `target`, and the command's own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)
        target = find_target(args, self.params)
        if target is not None:
            ctx.meta[_FLOW] = load_flow(target)
        try:
            rest = super().parse_args(ctx, list(args))  # Parsing takes them out of the list.
        except click.NoSuchOption as error:
            raise self._unknown(ctx, error.option_name, target) from None
        except click.UsageError as error:
            raise OptionError(
                _flag_with_value(args, self.get_params(ctx)) or _spoken(error),
                now=f"`{ctx.command_path} {target or 'FLOW'} --help` lists the options.",
            ) from None
        ctx.params["flow"] = ctx.meta[_FLOW]
        ctx.params["options"] = self._collect(ctx)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["FLOW", "[OPTIONS]"]  # The flow's file first: it decides which options there are.

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        flow = ctx.meta.get(_FLOW)
        return [*super().get_params(ctx), *(self._flow_options(flow) if flow else ())]

    def _flow_options(self, flow: Flow) -> list[click.Parameter]:
        taken = {name for param in self.params for name in param.opts} | {"--help"}
        notes = _described(flow.doc)
        options = (FlowOption.of(parameter, notes.get(parameter.name, "")) for parameter in flow.parameters)
        return [option for option in options if option is not None and not taken & set(option.opts)]

    def flow_of(self, ctx: click.Context) -> Flow:
        """Return the flow that the command line names."""
        flow: Flow = ctx.meta[_FLOW]
        return flow

    def _collect(self, ctx: click.Context) -> dict[str, object]:
        """Collect the flow's options.

        Raises:
            OptionError: one is given twice, is missing, does not exist, or can't have its value.
        """
        flow, given = self.flow_of(ctx), self._given(ctx)
        missing = [parameter.name for parameter in flow.parameters if parameter.is_required and parameter.name not in given]
        if missing:
            dashed = [f"--{name.replace('_', '-')} ..." for name in missing]
            raise OptionError(f"the flow {flow.name} needs {', '.join(missing)}", now=f"Add {' '.join(dashed)}")
        return given

    def _given(self, ctx: click.Context) -> dict[str, object]:
        """Return the flow's options that were given, by `--name` or `--set`."""
        flow = self.flow_of(ctx)
        given: dict[str, object] = {}
        for name in [name for name in ctx.params if name.startswith(_PREFIX)]:
            value = ctx.params.pop(name)
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                given[name.removeprefix(_PREFIX)] = value
        for text in ctx.params.pop("assignments"):
            name, value = _assigned(flow, text)
            if name in given:
                raise OptionError(f"{name} is given twice: as an option, and by --set {text}", now="Leave one of them out.")
            given[name] = value
        return given

    def _unknown(self, ctx: click.Context, name: str, target: str | None) -> OptionError:
        known = [option[2:] for param in self.get_params(ctx) for option in (*param.opts, *param.secondary_opts) if option.startswith("--")]
        # Without the dashes, which are alike in all: with them a short name is near to any other.
        hint = did_you_mean(name.lstrip("-").replace("_", "-"), [*known, "help"], "", cutoff=0.5).replace("'", "'--", 1)
        of = f"m2flow {ctx.info_name} and of the flow {ctx.meta[_FLOW].name}" if _FLOW in ctx.meta else f"m2flow {ctx.info_name}"
        lists = f"`{ctx.command_path} {target or 'FLOW'} --help` lists the options."
        return OptionError(f"{name} is no option of {of}", now=f"{hint} {lists}".lstrip())

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        flow = ctx.meta.get(_FLOW)
        if flow is None:
            super().format_help_text(ctx, formatter)
            return
        text = _without_arguments(flow.doc) or "This flow has no docstring."
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"The flow {flow.name}:")
            for paragraph in text.split("\n\n"):
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(" ".join(paragraph.split()))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        flow = ctx.meta.get(_FLOW)
        params = self.get_params(ctx)
        of_flow = [p.get_help_record(ctx) for p in params if isinstance(p, FlowOption)]
        own = [p for p in params if isinstance(p, click.Option) and not isinstance(p, FlowOption)]
        of_command = [record for p in own if (record := p.get_help_record(ctx))]
        if flow is not None:
            with formatter.section(f"Options of the flow {flow.name}"):
                formatter.write_dl(of_flow or [("none", "its function has no parameters")])
            shown = {option.parameter.name for option in params if isinstance(option, FlowOption)}
            for parameter in flow.parameters:
                if parameter.name not in shown:
                    formatter.write_text(_unshown(parameter))
        with formatter.section(f"Options of m2flow {ctx.info_name}"):
            formatter.write_dl(of_command)
        if flow is None:
            formatter.write_paragraph()
            formatter.write_text(f"A flow's parameters are options too: `{ctx.command_path} FLOW --help` lists them.")


def flow_command(name: str, cls: type[FlowCommand] = FlowCommand) -> Callable[[Callable[..., object]], FlowCommand]:
    """Decorate a function as a `FlowCommand` with the argument FLOW and the option `--set`."""

    def decorate(function: Callable[..., object]) -> FlowCommand:
        assignments = click.option(
            "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Give the flow's parameter NAME. May be repeated."
        )
        target = click.argument("target", metavar="FLOW")
        return click.command(name, cls=cls, no_args_is_help=True)(target(assignments(function)))

    return decorate


class FlowOption(click.Option):
    """An option that is a parameter of the flow. If it is not given, the flow's default holds."""

    def __init__(self, parameter: Parameter, kind: ParamType, note: str) -> None:
        dashed = parameter.name.replace("_", "-")
        flag = f"--{dashed}/--no-{dashed}" if kind is click.BOOL else f"--{dashed}"
        super().__init__([flag, f"{_PREFIX}{parameter.name}"], type=kind, default=None, help=note)
        self.parameter = parameter

    @classmethod
    def of(cls, parameter: Parameter, note: str = "") -> FlowOption | None:
        """Make the option of a parameter; None if text can't be converted to the parameter's type."""
        kind = option_type(parameter.type)
        return None if kind is None else cls(parameter, kind, note)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        left = " / ".join((*self.opts, *self.secondary_opts))
        if not self.secondary_opts:
            left += f" {metavar(self.type)}"
        default = "required" if self.parameter.is_required else f"default {_written(self.parameter.default)}"
        return left, f"{self.help}  [{default}]" if self.help else default


class _OneOf(ParamType):
    """A value of a `Literal` or an `Enum`, by its written form."""

    name = "choice"

    def __init__(self, values: Sequence[object]) -> None:
        self.by_text = {_written(value): value for value in values}

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        text = str(value)
        if text in self.by_text:
            return self.by_text[text]
        hint = did_you_mean(text, self.by_text, "")
        self.fail(f"{text!r} is not one of {', '.join(self.by_text)}. {hint}".rstrip(), param, ctx)


class _Either(ParamType):
    """A union: the first of several types that accepts the text; `none` is None where that is allowed."""

    name = "either"

    def __init__(self, members: Sequence[ParamType], *, may_be_none: bool) -> None:
        self.members = members
        self.may_be_none = may_be_none

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if self.may_be_none and value == "none":
            return None
        for member in self.members[:-1]:
            try:
                return member.convert(value, param, ctx)
            except click.BadParameter:
                continue
        return self.members[-1].convert(value, param, ctx)


_PLAIN: Mapping[object, ParamType] = {
    bool: click.BOOL,
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
}


def option_type(annotation: object) -> ParamType | None:
    """Return the click type that converts text to a value of this type; None if there is none."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return option_type(arguments[0])
    if origin is typing.Literal:
        return _OneOf(arguments)
    if origin in (typing.Union, types.UnionType):
        members = [option_type(argument) for argument in arguments if argument is not type(None)]
        known = [member for member in members if member is not None]
        return _Either(known, may_be_none=type(None) in arguments) if len(known) == len(members) else None
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _OneOf(list(annotation))
    return _PLAIN.get(annotation)


def metavar(kind: ParamType) -> str:
    """Return the help's placeholder for a value of this type."""
    if isinstance(kind, _OneOf):
        return f"[{'|'.join(kind.by_text)}]"
    if isinstance(kind, _Either):
        return "|".join([metavar(member) for member in kind.members] + (["none"] if kind.may_be_none else []))
    return kind.name.upper()


def find_target(args: Sequence[str], params: Sequence[click.Parameter]) -> str | None:
    """Find the flow's file among the arguments: a `.py` path, else the first that is neither an option nor a known option's value."""
    takes_value = {name for p in params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
    candidates = []
    is_value = False
    for arg in args:
        if is_value:
            is_value = False
        elif arg.startswith("-") and arg != "-":
            is_value = arg in takes_value
        else:
            candidates.append(arg)
    scripts = [arg for arg in candidates if arg.partition(":")[0].endswith(".py")]
    return next(iter(scripts or candidates), None)


def _assigned(flow: Flow, text: str) -> tuple[str, object]:
    """Parse one `--set NAME=VALUE`."""
    name, separator, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not separator:
        raise OptionError(f"--set {text}: there is no value", now="Write --set name=value")
    parameter = next((parameter for parameter in flow.parameters if parameter.name == name), None)
    if parameter is None:
        names = [parameter.name for parameter in flow.parameters]
        hint = did_you_mean(name, names, f"It has {', '.join(names) or 'none'}.")
        raise OptionError(f"--set {text}: the flow {flow.name} has no parameter {name!r}", now=hint)
    kind = option_type(parameter.type)
    if kind is None:
        raise OptionError(f"--set {text}: {_unshown(parameter)}")
    try:
        return name, kind.convert(value, None, None)
    except click.BadParameter as error:
        raise OptionError(f"--set {text}: {error.message}") from None


def _unshown(parameter: Parameter) -> str:
    """Say why a parameter is not among the options."""
    if option_type(parameter.type) is not None:
        return f"{parameter.name} is also the name of an option of m2flow: give the flow's with --set {parameter.name}=VALUE."
    name = getattr(parameter.type, "__name__", None) or str(parameter.type)
    return f"{parameter.name} is a {name}, which can't be given on the command line; its default holds."


def _spoken(error: click.UsageError) -> str:
    """Format click's message without its heading: `--num-steps: 'x' is not a valid integer`."""
    if isinstance(error, click.MissingParameter):
        return "no flow is given" if isinstance(error.param, click.Argument) else error.format_message().rstrip(".")
    if isinstance(error, click.BadParameter):
        hint = error.param.opts[0] if error.param is not None else str(error.param_hint or "")
        return f"{hint}: {error.message}".removeprefix(": ").rstrip(".")
    return error.format_message().rstrip(".")


_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def _flag_with_value(args: Sequence[str], params: Sequence[click.Parameter]) -> str:
    """Say which flag was given a value, `--lora true` or `--lora=true`, and what to write; empty if none was."""
    flags = [param for param in params if isinstance(param, click.Option) and param.is_flag]
    opposites = {name: other for flag in flags for name, other in itertools.zip_longest(flag.opts, flag.secondary_opts)}
    opposites |= {other: name for name, other in opposites.items() if other is not None}
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        name, equals, value = arg.partition("=")
        value = value if equals else following
        if name in opposites and (equals or value.lower() in _TRUE | _FALSE):
            other = opposites[name]
            if value.lower() in _FALSE:
                whole = f"`{name}{equals or ' '}{value}`"
                return f"{name} is a flag: " + (f"say {other} in place of {whole}" if other else f"leave {whole} out")
            return f"{name} is a flag: leave `{equals}{value}` out" + (f", or say {other}" if other else "")
    return ""


def _written(value: object) -> str:
    """Format a value as it is written on the command line."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


_ARGUMENTS = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)


def _described(doc: str) -> dict[str, str]:
    """Parse the descriptions of parameters in a docstring's `Args:`."""
    found = _ARGUMENTS.search(doc)
    if not found:
        return {}
    entries = re.split(r"^(\w+):", textwrap.dedent(found[1]), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def _without_arguments(doc: str) -> str:
    return _ARGUMENTS.sub("", doc).strip()
