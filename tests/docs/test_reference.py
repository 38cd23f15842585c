"""The reference that `make docs` writes has every public name, field of a spec, command and option."""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner

import m2flow
from m2flow import errors, rewards, spec
from m2flow.cli.help import ELSEWHERE, LATER, SINCE, TOPICS, docstring, documentation, help_of, methods, public
from m2flow.cli.main import cli
from m2flow.engines.distributed import DeepSpeedOptions as Options
from m2flow.engines.registry import capability_tables, engines
from m2flow.engines.servers import sglang, vllm
from m2flow.engines.servers.inference_server import ServedRolloutOptions
from m2flow.errors import OptionError
from m2flow.macro.handles import Handle
from m2flow.macro.loss_declarations import LOSSES
from m2flow.observe.spans import SpanName
from m2flow.recipe import AdvantageName
from m2flow.rollout_scheduling.policies import POLICIES
from m2flow.viewer.health import RULES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
WRITER = runpy.run_path(str(ROOT / "docs" / "write_reference.py"), run_name="write_reference")
PAGES: dict[str, str] = WRITER["pages"]()
markdown: Callable[[str], list[str]] = WRITER["markdown"]
write_site = WRITER["write_site"]


def _section(page: str, title: str) -> str:
    return f"\n{PAGES[page]}\n".partition(f"\n## {title}\n")[2].partition("\n## ")[0]


NAMES = [(topic, name, value) for topic in TOPICS for name, value in public(topic).items()]


@pytest.mark.parametrize(("topic", "name", "value"), NAMES, ids=[name for _, name, _ in NAMES])
def test_every_public_name_has_a_section_that_says_what_it_is(topic: str, name: str, value: object) -> None:
    first = (value.__doc__ or "").strip().splitlines()[0]
    assert first in _section(f"{topic}.md", name)
    assert first in help_of(name)


@pytest.mark.parametrize(("topic", "name", "value"), NAMES, ids=[name for _, name, _ in NAMES])
def test_every_public_name_says_since_when(topic: str, name: str, value: object) -> None:
    assert f"\nSince {SINCE}.\n" in _section(f"{topic}.md", name)
    assert f"\nSince {SINCE}." in help_of(name)


def test_what_came_later_says_since_when_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    later = {"Best": "0.2.0", "Dataset.shard": "0.3.0", "Dataset.csv.stream": "0.4.0", "Lora.rank": "0.5.0"}
    for name, version in later.items():
        monkeypatch.setitem(LATER, name, version)
    written = WRITER["pages"]()
    page = written["evaluation.md"] + written["data.md"] + written["training.md"]
    assert re.findall(r"(?m)^.*[Ss]ince 0\.[2-9].*$", page) == [
        "Since 0.2.0.",
        "`stream` since 0.4.0.",
        "Since 0.3.0.",
        f"Since {SINCE}. `rank` since 0.5.0.",
    ]
    assert re.search(r"\| \[`Best`\].* \| 0\.2\.0 \|", page)
    assert "Since 0.3.0." in help_of("Dataset.shard")
    assert "Since" not in help_of("Dataset.csv").replace("`stream` since 0.4.0.", "")


def test_every_public_name_stands_on_one_page() -> None:
    of_flows = [name for topic, name, _ in NAMES if topic != "rewards"]
    assert sorted(of_flows) == sorted(m2flow.__all__)
    off_the_shelf = [name for name, kind in vars(rewards).items() if inspect.isclass(kind) and issubclass(kind, rewards.SampleReward)]
    assert sorted(public("rewards")) == sorted(set(off_the_shelf) - {"SampleReward"})


def test_every_option_of_a_public_function_is_explained() -> None:
    missing = []
    for _, name, value in NAMES:
        about = docstring(value) + " ".join(f"`{field}`" for field in (documentation(value) if inspect.isclass(value) else ()))
        members = [(f"{name}.{method}", member) for method, member in methods(value)] if inspect.isclass(value) else []
        for path, member in [(name, value), *members]:
            if (inspect.isclass(member) and issubclass(member, Enum | Handle | m2flow.Number)) or isinstance(member, property):
                continue
            text = about + (inspect.getdoc(member) or "")
            options = [
                one for one in inspect.signature(member).parameters.values() if one.kind is one.KEYWORD_ONLY or one.default is not one.empty
            ]
            missing += [f"{path}({one.name}=)" for one in options if not re.search(rf"\b{one.name}\b", text)]
            missing += [path] if not inspect.getdoc(member) else []
    assert missing == []


def test_the_site_has_every_page_and_its_search_every_public_name(tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    folder.mkdir()
    for name, text in PAGES.items():
        (folder / name).write_text(text)
    pages = write_site(folder, tmp_path / "site")
    assert {f"reference/{name.removesuffix('.md')}" for name in PAGES} | {"index", "guide/flows"} <= {page.place for page in pages}
    search = (tmp_path / "site" / "search.js").read_text()
    sections = json.loads(search.partition(" = ")[2].partition(";\n")[0])
    assert {name for _, name, _ in NAMES} <= {section["title"] for section in sections}
    for section in sections:
        place, _, anchor = section["place"].partition("#")
        assert not anchor or f'id="{anchor}"' in (tmp_path / "site" / place).read_text(), section["place"]


def test_a_link_that_leads_nowhere_stops_the_site(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n\nSee [B](b.md).\n")
    with pytest.raises(ValueError, match=r"a\.md: the link b\.md leads nowhere"):
        write_site(tmp_path, tmp_path / "site")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Policy.generate", "max_new_tokens: of a response at most"),
        ("rollout.max_running", "Most samples that an instance decodes in one batch."),
        ("checkpoint_steps", "Steps from one checkpoint to the next"),
        ("simulate rollout", "Usage: m2flow simulate rollout"),
        ("Dataset.within", "Bound the prompts' tokens"),
        ("data", "Dataset "),
        ("m2flow.rewards.ExactMatch", "1 if the response is the row's answer"),
        ("prompttoolong", "The prompt and its answer do not fit"),
        ("longest-first", "Rank by expected length"),
        ("LostState", "A user's function changes what it captures"),
        ("Env", "from m2flow.environments.env import Env"),
        ("m2flow.environments.actor_critic.Simulator", "Lanes of environments of one task."),
        ("adaptive_kl_coef", "The coefficient of a KL penalty for the next step"),
    ],
)
def test_help_in_the_terminal_knows_names_methods_fields_commands_and_topics(name: str, said: str) -> None:
    done = CliRunner().invoke(cli, ["help", *name.split()])
    assert done.exit_code == 0, done.output
    assert said in done.output


def test_help_without_a_name_lists_all_and_an_unknown_name_is_answered_with_the_nearest() -> None:
    listed = CliRunner().invoke(cli, ["help"]).output
    assert not [name for _, name, _ in NAMES if name not in listed]
    done = CliRunner().invoke(cli, ["help", "Polcy"])
    assert done.exit_code == 2
    assert "Did you mean 'Policy'?" in done.output


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("staleness", "more: m2flow help flow."),
        ("lagged", "It is Metrics.lagged: m2flow help Metrics.lagged."),
        ("max_turns", "It is an option of Policy.rollout, Chat.conversation: m2flow help Policy.rollout."),
        ("handle", "docs/guide/glossary.md explains m2flow's words."),
    ],
)
def test_a_word_that_is_no_name_is_answered_with_where_it_belongs(name: str, now: str) -> None:
    with pytest.raises(OptionError) as found:
        help_of(name)
    assert found.value.now.endswith(now)


@pytest.mark.parametrize("name", [name for names in ELSEWHERE.values() for name in names.split()])
def test_help_knows_what_flows_import_from_elsewhere(name: str) -> None:
    assert f"import {name}\n" in help_of(name)


@pytest.mark.parametrize(("page", "root"), [("cluster-spec.md", spec.ClusterSpec), ("run-settings.md", spec.RunSettings)])
def test_every_field_of_a_spec_is_there_with_its_meaning(page: str, root: type[Any]) -> None:
    missing = []
    models = [model for model in vars(spec).values() if isinstance(model, type) and issubclass(model, root.__mro__[1])]
    for model in models if root is spec.ClusterSpec else [root]:
        if model.__name__.startswith("_") or (model is spec.RunSettings and root is not model):
            continue
        rows = [line for line in _section(page, model.__name__).splitlines() if line.startswith("| `")]
        assert len(rows) == len(model.model_fields)
        missing += [name for name in model.model_fields if not documentation(model).get(name)]
        missing += [name for name, row in zip(model.model_fields, rows, strict=True) if not row.startswith(f"| `{name}` |")]
    assert missing == []


def _commands(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(f"{words} {name}", found)


def test_every_command_is_there_with_all_of_its_options() -> None:
    for words, command in _commands("m2flow", cli):
        said = _section("commands.md", words)
        options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
        assert "Usage: m2flow" in said, words
        assert not [name for option in options for name in option.opts if name not in said], words


def test_the_table_of_other_systems_has_a_row_for_each_algorithm_and_lacks_none_that_three_of_them_have() -> None:
    from peer_algorithms import HAVE, LACKING, VERSIONS

    names = {one.__name__ for functions in WRITER["algorithms"]().values() for one in functions}
    assert names == HAVE.keys()
    assert set().union(*HAVE.values(), *LACKING.values()) == VERSIONS.keys()
    assert not [name for name, systems in LACKING.items() if len(systems) >= 3]
    rows = _section("algorithms.md", "Ours against other systems").splitlines()
    linked = {found[1] for row in rows if (found := re.match(r"\| \[`[\w.]+\.(\w+)`\]\(#\w+\)", row))}
    assert linked == names
    assert "Source" in _section("algorithms.md", "losses.gspo")


def test_every_advantage_and_loss_is_in_the_table_of_algorithms() -> None:
    missing = [name for name in (*get_args(AdvantageName), *LOSSES) if f".{name}`" not in PAGES["algorithms.md"]]
    assert not missing


def test_every_scheduling_policy_is_there_and_says_whether_it_is_a_baseline() -> None:
    for name in POLICIES:
        assert re.search("[Bb]aseline", _section("policies.md", name)), name


def test_spans_are_there_with_their_attributes_and_counters() -> None:
    page = PAGES["spans.md"]
    assert not [name.value for name in SpanName if f"- `{name.value}`: " not in page]
    assert "waited_us" in _section("spans.md", "Attributes that viewers understand")
    assert "kv capacity" in _section("spans.md", "Counters, by worker")
    assert not [
        rule for rule in RULES.values() if f"| {rule.title} | {rule.level} | {rule.threshold} |" not in _section("spans.md", "Alerts")
    ]


def test_every_error_is_in_the_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.M2FlowError)]
    assert not [kind.__name__ for kind in kinds if f"- `{kind.__name__}`: " not in PAGES["errors.md"]]


def test_a_docstring_becomes_markdown() -> None:
    docstring = """Add.

    Args:
        a: a number,
            of any size.

    >>> 1 + 1
    2
    """
    assert markdown(docstring) == [
        "Add.",
        "",
        "**Args**",
        "",
        "- `a`: a number,",
        "  of any size.",
        "",
        "",
        "```python",
        ">>> 1 + 1",
        "2",
        "```",
        "",
    ]


def test_the_options_of_every_engine_are_there_with_their_meanings() -> None:
    said = _section("engines.md", "Options of train `deepspeed`")
    assert not [name for name in Options.__dataclass_fields__ if not documentation(Options).get(name) or f"| `{name}` |" not in said]
    for engine, own in (("sglang", sglang.OWN_OPTIONS), ("vllm", vllm.OWN_OPTIONS)):
        with pytest.raises(errors.EngineError) as refused:
            ServedRolloutOptions(engine, {"no_such_option": 1}, own).check()
        names = refused.value.now.removeprefix("It has ").removesuffix(".").split(", ")
        said = _section("engines.md", f"Options of rollout `{engine}`")
        assert set(own) < set(names)
        assert not [name for name in names if f"- `{name}`: " not in said]


def test_the_limits_of_engines_are_those_of_their_docstrings() -> None:
    for engine, limit in (
        ("rollout `sglang`", "random numbers"),
        ("rollout `vllm`", "tied embeddings"),
        ("train `fsdp`", "tensor parallel"),
    ):
        assert f"- **{limit}**: " in _section("engines.md", f"Limits of {engine}")
    assert "stage 0 with `bfloat16`" in _section("engines.md", "Limits of train `deepspeed`")


def test_the_reference_has_the_capabilities_of_every_engine_of_the_registry() -> None:
    built_in = [info for info in engines() if info.factory.startswith("m2flow.")]
    assert _section("engines.md", "Capabilities").strip() == capability_tables(built_in).strip()


@pytest.mark.parametrize("name", ["Env", "TurnEnv", "PettingZoo", "OpenEnv", "verifiers_agent", "Simulator", "ActorCritic"])
def test_the_page_of_environments_explains_what_a_user_writes(name: str) -> None:
    section = f"{PAGES['environments.md']}\n".partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert f"\n{name}(" in section
    assert len(section.split()) > 20


def test_the_page_of_modules_has_every_docstring() -> None:
    page = PAGES["modules.md"]
    files = sorted((ROOT / "m2flow").rglob("*.py"))
    said = [ast.get_docstring(ast.parse(path.read_text())) for path in files]
    assert len(files) > 200
    assert not [str(path) for path, text in zip(files, said, strict=True) if text and text not in page]
    assert "## m2flow.micro.scheduler.scheduler\n" in page


@pytest.mark.parametrize("name", ["run", "plan", "simulate"])
def test_help_of_a_function_names_the_command_that_is_called_the_same(name: str) -> None:
    assert help_of(name).endswith(f"\n\nFor the command of this name: m2flow {name} --help")
    assert f"\nUsage: m2flow {name}" not in help_of(name)
