"""Try a flow's first rows before anything starts: render its prompts, and call its functions on one stub sample.

    first rows --the policy's template and tokenizer--> tokens, fewer than the context has
    first row + stub response --rewards, ops, filters, each by itself--> results, checked as in a run

The stub response is the row's reference (`target`, `answer`, `solution`) or an empty text; it has tokens, log-probabilities of 0 and a
finish, and there are as many of it as the flow generates of a prompt. What comes of a model (scores, updates) is not known, and neither is
what is computed from that. Roles and ops that declare what they read or write are not called: they have a state.

All happens in a fork of this process, on its main thread, so that nothing that a function does is left here. A function is stopped when
it opens a connection or writes a file outside a temporary directory, and when it takes too long: a plan changes nothing. Limit: Python's
audit events do not see what native code or a program that a function starts does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, cast, final

import numpy as np

from m2flow.agents.chat import Agent, may_use_tools
from m2flow.agents.conversation import rewrites
from m2flow.agents.tools import NO_TOOLS, check_family, presents_tools
from m2flow.engines.contract import FunctionEngine, Generated
from m2flow.engines.functions import error_of, units_of
from m2flow.engines.registry import built_in
from m2flow.errors import DatasetError, ErrorRecord, M2FlowError, ModelError, described, error_from_record
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import Call, Granularity, MacroGraph
from m2flow.macro.row_files import TAKEN
from m2flow.micro.protocol import call_semantics
from m2flow.micro.worker.function_tasks import Functions
from m2flow.observe.spans import Recorder
from m2flow.planner.model_shapes import ModelShape
from m2flow.recipe import Episodes, Model, Sampling
from m2flow.samples import Batch, Finish, Ragged, make_ids, packed_masks, taken
from m2flow.spec import ClusterSpec

_ROWS = 8
"""Prompts of a call that are rendered."""
_REFERENCES = ("target", "answer", "solution")
_LOAD_S = 120.0
"""Time to load the tokenizers and render the rows."""
_EACH_S = 5.0
"""Time of one function on its unit."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_SHOWN = 60


def try_first_rows(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, *, seed: int) -> list[str]:
    """Render the first rows of a traced flow, and call each of its functions once; return what was found, in lines.

    Raises:
        M2FlowError: a model of this machine has no weights, a row has no rendering or is too long, or a function fails on the stub sample;
            with the flow's line.
    """
    if {spec.rollout.engine, spec.train.engine} == {"fake"}:
        return []
    if not spec.pools:
        for role, model in models.items():
            _check_weights(role, model)
    here, there = Pipe()
    with tempfile.TemporaryDirectory(prefix="m2flow-plan-") as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Newer Pythons warn of a fork beside threads; it takes no lock of theirs.
            child = os.fork()
        if child == 0:
            here.close()
            _serve(there, folder, _Trial(graph.calls, models, spec, seed, folder, there))
        there.close()
        try:
            return _heard(here)
        finally:
            here.close()
            for kill in (os.killpg, os.kill):  # It may not lead its group yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


_WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}


def _check_weights(role: str, model: Model) -> None:
    folder = Path(model.path)
    if model.init == "pretrained" and folder.is_dir() and not any(file.suffix in _WEIGHTS for file in folder.iterdir()):
        raise ModelError(
            f"the model of {role}, {folder}, has no weights: no *.safetensors in it", now="Copy them there, or pass init='random'."
        )


def _heard(link: Connection) -> list[str]:
    """Collect the child's lines until it has ended, or has run one function for too long."""
    lines: list[str] = []
    doing, limit_s = "the tokenizers", _LOAD_S
    while link.poll(limit_s):
        try:
            kind, said = json.loads(link.recv_bytes())
        except EOFError:
            return lines
        match kind:
            case "begin":
                doing, limit_s = said, _EACH_S
            case "load":
                limit_s = _LOAD_S
            case "line":
                lines.append(said)
            case "error":
                raise error_from_record(ErrorRecord(*said))
    return [*lines, f"{doing}: took longer than {limit_s:g} s; what comes after it was not tried"]


def _serve(link: Connection, folder: str, trial: _Trial) -> NoReturn:
    """Be the child: try all, and end without what a process does at its end, which is the parent's."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open to the end)
        sys.dont_write_bytecode = True
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        trial.run()
    except M2FlowError as error:
        found = error.to_record()
        link.send_bytes(json.dumps(["error", [found.kind, found.what, found.where, found.now, found.remote]]).encode())
    except BaseException as error:
        link.send_bytes(json.dumps(["line", f"the rest was not tried: {described(error)}"]).encode())
    finally:
        os._exit(0)


_HEAVY = ("torch", "transformers")


@contextlib.contextmanager
def _without_torch(models: Iterable[Model], link: Connection) -> Iterator[None]:
    """Load tokenizers in the block without torch, which `transformers` loads where it finds it: most of the time of a plan.

    Afterwards both can be imported as ever, and a function that does so gets the time for it. Where the flow has loaded one already,
    and for a model that is converted first, nothing is kept out.
    """
    if any(name in sys.modules for name in _HEAVY) or any(model.path.endswith(".gguf") for model in models):
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that it is found nowhere
    try:
        yield
    finally:
        del sys.modules["torch"]
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers" or name.startswith("m2flow.engines.models.")]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Announced(link))


@final
class _Announced(MetaPathFinder):
    """Finds no module, and tells the process that keeps the time of heavy ones that are looked for."""

    def __init__(self, link: Connection) -> None:
        self._link = link

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in _HEAVY:
            self._link.send_bytes(json.dumps(["load", fullname]).encode())


class _Reached(BaseException):
    """A function does what a plan must not: no `Exception`, so that no function takes it for a fault of its own."""


def _watch(folder: str, reached: list[str]) -> None:
    """Stop this process's connections, and its writes outside a directory; note each in `reached`."""
    allowed = (os.path.realpath(folder) + os.sep, "/dev/")

    def look(event: str, args: tuple[Any, ...]) -> None:
        what = ""
        if event == "socket.connect":
            what = f"connects to {args[1]}"
        elif event == "socket.getaddrinfo":
            what = f"connects to {args[0]}"
        elif event in ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"):
            is_write = event != "open" or bool((args[2] or 0) & _WRITES)
            if is_write and isinstance(args[0], str | bytes | os.PathLike):
                path = os.path.realpath(os.fsdecode(args[0]))
                what = "" if f"{path}{os.sep}".startswith(allowed) else f"writes {path}"
        if what:
            reached.append(what)
            raise _Reached(what)

    sys.addaudithook(look)


@final
class _OnMainThread(FunctionEngine):
    """Run functions one unit after the other on this thread. The process that waits for this one keeps the time."""

    name = "python"
    capabilities = built_in("python", "function")

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def call(self, function: Callable[..., object], batch: Batch, *, granularity: str, size: int | None = None, **how: Any) -> list[object]:
        results = []
        for unit in units_of(batch.in_order().frozen(), granularity, size):
            try:
                result = function(unit.argument)
                results.append(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
            except Exception as error:
                raise error_of(function, unit.label, error) from error
        return results


async def _awaited(result: Awaitable[object]) -> object:
    return await result


@final
class _Trial:
    """The child's work."""

    def __init__(
        self, calls: Sequence[Call], models: Mapping[str, Model], spec: ClusterSpec, seed: int, folder: str, link: Connection
    ) -> None:
        self._calls = calls
        self._models = models
        self._spec = spec
        self._seed = seed
        self._folder = folder
        self._link = link
        self._values: dict[int, object] = {}
        """Call -> its value on the stub sample, where that is known."""
        self._codecs: dict[str, Any] = {}
        self._kept: dict[int, bool] = {}
        """Call that keeps rows -> whether it keeps the stub sample."""
        self._tried: set[tuple[str, str]] = set()
        self._reached: list[str] = []
        self._raw: set[str] = set()
        """Roles of which it was said that they get raw texts."""
        self._functions = Functions(_OnMainThread(), run="", run_seed=seed, recorder=Recorder("plan"))

    def run(self) -> None:
        """Render the rows, then call the functions, in the order of the program."""
        with _without_torch(self._models.values(), self._link):
            for call in self._calls:
                self._render(call)
                if call.engine == "rollout":
                    self._codec(call)
        _watch(self._folder, self._reached)
        for call in self._calls:
            inputs = {name: self._values[ref.call] for name, ref in call.inputs if ref.call in self._values}
            if len(inputs) < len(call.inputs):
                if self._is_users(call):
                    missing = next(self._calls[ref.call].name for _, ref in call.inputs if ref.call not in self._values)
                    self._say(call, f"not called, since it needs what {missing} gives")
                continue
            self._value(call, inputs)

    def _value(self, call: Call, inputs: Mapping[str, object]) -> None:
        if call.engine == "source":
            rows = call.options["rows"]
            assert isinstance(rows, Batch)
            self._values[call.ordinal] = rows.take(range(*rows.group_bounds()[0]))
        elif call.engine == "rollout":
            self._values[call.ordinal] = self._stub(call, next(v for v in inputs.values() if isinstance(v, Batch)))
        elif call.engine == "function" and not self._is_users(call):
            with contextlib.suppress(Exception):  # What m2flow computes of a stub may not exist: a mean over nothing.
                self._values[call.ordinal] = self._called(call, inputs)
        elif call.engine == "function":
            self._try(call, inputs)

    def _is_users(self, call: Call) -> bool:
        """Whether a call runs a function of the user that has not been tried yet."""
        return call.engine == "function" and not _is_built_in(call) and (call.name, str(call.site)) not in self._tried

    # Rows

    def _render(self, call: Call) -> None:
        """Render the first rows that a model gets from a dataset.

        Raises:
            DatasetError: one is refused, or as long as the context.
        """
        source = next((self._calls[ref.call] for _, ref in call.inputs if self._calls[ref.call].engine == "source"), None)
        key = call.name, str(call.site)
        if call.engine not in ("rollout", "train") or source is None or key in self._tried:
            return
        self._tried.add(key)
        rows = source.options["rows"]
        assert isinstance(rows, Batch)
        codec, context = self._codec(call), self._context(call.role)
        if codec is None or "prompt" not in rows:
            return
        counts = []
        for row in range(min(_ROWS, len(rows))):
            where = f"row {row} that {source.name} gives to {call.name}"
            try:
                counts.append(len(codec.encode_prompt(rows.ragged("prompt").item(row))))
            except DatasetError as error:
                raise DatasetError(f"{where}: {error.what}", where=source.site.describe(), now=error.now) from None
            if context and counts[-1] >= context:
                now = f"Leave such rows out, or shorten them: {source.role}.within(policy, max_prompt_tokens=..., too_long='drop')."
                what = f"{where}: its prompt has {counts[-1]:,} tokens, and the model's context is {context:,}"
                raise DatasetError(what, where=source.site.describe(), now=now)
        is_agent = "agent" in call.options
        told = " in `prompt`, beside what the agent tells the model" if is_agent else ""
        self._say(call, f"the first {len(counts)} rows of {source.role} have {_span(counts)} tokens each{told}")
        model = self._models[call.role]
        if codec.template and not model.chat and not is_agent and rows.ragged("prompt").kind == "text" and call.role not in self._raw:
            self._raw.add(call.role)
            self._say(call, "they are sent as raw texts; Policy(..., chat=True) writes them in the model's chat template")
        given = model.template
        if given.tools != "[]" and not presents_tools(codec.template):
            self._say(call, "the chat template writes no tools: the model does not see those of tools=")
        for role in call.speakers if is_agent else ():
            if (of := self._codec(call, role)) is not None and of.template:
                self._look_at_template(call, of, role)

    def _look_at_template(self, call: Call, codec: Any, role: str) -> None:
        """Say what a chat template does to the turns of a model that speaks to an agent.

        Raises:
            DatasetError: it rewrites them, which the rollout refuses; or it presents tools that the agent uses, and nobody knows how their
                calls are read.
        """
        bounds, agent = call.options["episodes"], Agent.of(cast("Any", call.options["agent"]))
        assert isinstance(bounds, Episodes)
        uses_tools = may_use_tools(agent.function.fresh() if isinstance(agent.function, Snapshot) else agent.function)
        if role == call.role and uses_tools and not presents_tools(codec.template):
            self._say(call, NO_TOOLS)
        elif role == call.role and uses_tools and agent.tool_calls is None:
            try:
                check_family(codec.template)
            except DatasetError as error:
                raise DatasetError(f"{call.name}: {error.what}", where=call.site.describe(), now=error.now) from None
        try:
            how = rewrites(codec, "user", has_tools=uses_tools)
        except DatasetError:
            return  # An agent may never say what the probe does.
        if not how:
            return
        if bounds.history == "refuse":
            raise DatasetError(
                f"the chat template of {role} would {how} once a further user's message follows, and history='refuse'",
                where=call.site.describe(),
                now="history='append' keeps the tokens of each turn as they were sampled.",
            )
        ending = "; the conversation goes on in a sequence as it writes it" if bounds.history == "fork" else "; its tokens are kept"
        self._say(call, f"the chat template of {role} would {how} at a further user's message" + ending)

    def _codec(self, call: Call, role: str = "") -> Any:
        """The tokenizer of a call's model, or of another that speaks in it; None where it is on other machines alone."""
        role = role or call.role
        if role not in self._codecs:
            # Tokenizers are the engines', and take seconds to import.
            from m2flow.engines.models.model_files import load_tokenizer

            try:
                self._codecs[role] = load_tokenizer(self._models[role])
            except ModelError as error:
                if not self._spec.pools and role not in self._spec.shapes:
                    raise error.located(call.site.describe()) from None
                self._codecs[role] = None
        return self._codecs[role]

    def _context(self, role: str) -> int:
        """Tokens of prompt and response that a role's model takes; 0: not known."""
        own = 0
        with contextlib.suppress(M2FlowError, OSError):
            from m2flow.engines.models.model_files import model_directory

            own = ModelShape.from_config(str(model_directory(self._models[role]))).max_context
        set_to = self._spec.rollout.options.get("max_context", 0)
        return min(own or set_to, set_to or own) if isinstance(set_to, int) else own

    def _stub(self, call: Call, prompts: Batch) -> Batch:
        """Make the responses of a generation to its first prompt: `n` of the stub."""
        n, sampling, codec = call.options["n"], call.options["sampling"], self._codec(call)
        assert isinstance(n, int)
        assert isinstance(sampling, Sampling)
        rows = prompts.in_order().take([0] * n)
        ids = make_ids(call.ordinal, 1, n)
        text = next((value for name in _REFERENCES if name in rows and isinstance(value := next(rows.rows())[name], str)), "")
        asked = call_semantics.requests(call, ids.tolist(), rows, self._seed)
        prompt = asked[0].prompt
        encoded = list(prompt) if isinstance(prompt, tuple) else codec.encode_prompt(prompt) if codec else list(str(prompt).encode())
        tokens = codec.encode_target(text) if codec else list(text.encode())
        is_cut = len(tokens) > sampling.max_new_tokens
        tokens = tokens[: sampling.max_new_tokens]
        made = Generated(
            id=0,
            prompt_tokens=np.array(encoded, np.int32),
            tokens=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int32),
            kv_stale=np.zeros(len(tokens), np.bool_),
            finish=Finish.LENGTH if is_cut else Finish.STOP,
            text=codec.decode(tokens) if is_cut and codec else text,
            prompt_text=codec.prompt_text(prompt) if codec and not isinstance(prompt, tuple) else None,
            sampling_mask=packed_masks([np.zeros(0, np.int32) for _ in tokens]) if sampling.sampling_mask else None,
        )
        if "agent" in call.options:  # Agents speak to a model: none is called here.
            record = {"turns": [{"finish": int(made.finish), "text": made.text}], "tools": {}, "rewards": {}}
            made = replace(made, columns={"reward": 0.0, "failure": "", "num_turns": 1, "episode": record})
        seeds = {request.id: request.seed for request in asked}
        return call_semantics.responses([call] * n, [replace(made, id=request.id) for request in asked], rows, seeds)

    # Functions

    def _try(self, call: Call, inputs: Mapping[str, object]) -> None:
        """Call a user's function on the stub sample, once a place of the program.

        Raises:
            M2FlowError: it raised, or returned what it may not.
        """
        self._tried.add((call.name, str(call.site)))
        state = "it is a role" if "instance" in call.options else "it declares what it reads or writes" if call.reads else ""
        if state:
            self._say(call, f"not called, since {state}")
            return
        self._send("begin", f"{call.site}  {call.name}")
        value: object = None
        failed: M2FlowError | None = None
        try:
            value = self._called(call, inputs)
        except M2FlowError as error:
            failed = error
        except _Reached:
            pass
        if self._reached:
            self._say(call, f"not tried, since it {self._reached[0]}")
            self._reached.clear()
        elif failed is None:
            self._values[call.ordinal] = value
            keeps = {True: "keeps", False: "leaves out", None: f"gives {_shown_value(value)} on"}
            self._say(call, f"{keeps[self._kept.get(call.ordinal)]} the stub sample")
        elif call.options.get("on_error") is not None:
            self._say(call, f"counts as {call.options['on_error']} on the stub sample: {failed.what}")
        else:
            raise self._explained(call, inputs, failed) from None

    def _called(self, call: Call, inputs: Mapping[str, object]) -> object:
        """The value of a call on these inputs; of a function on samples it is the first one's, for all."""
        rows = {name: value.in_order() for name, value in inputs.items() if isinstance(value, Batch)}
        values = {name: value for name, value in inputs.items() if name not in rows}
        base = next(iter(rows.values()), None)
        whole = rows
        is_each = call.granularity is Granularity.SAMPLE and not _is_built_in(call)
        if is_each and call.is_aligned:
            rows = {name: batch.take([0]) if len(batch) else batch for name, batch in rows.items()}
        result = self._functions.run_call(call, rows, values)
        if not isinstance(result, Batch):
            return call_semantics.plain_value(call, result) if call.engine == "function" and not call.is_aligned else result
        result, _ = call_semantics.without_parts(result)
        if call_semantics.gives(call) == "kept" and base is not None:
            self._kept[call.ordinal] = bool(len(result))
            # What a filter drops, too: what comes after it is to be tried.
            return (
                base
                if call.options.get("style") == "columns" or "arguments" in call.options
                else call_semantics.function_input(call, whole)
            )
        if is_each and base is not None and len(result) == 1:
            return Batch(base.ids, taken(result.columns, np.zeros(len(base), np.int64)))
        return result

    def _explained(self, call: Call, inputs: Mapping[str, object], error: M2FlowError) -> M2FlowError:
        """The error with the line of the flow, and what the function was given."""
        rows = next((value for value in inputs.values() if isinstance(value, Batch) and len(value)), None)
        given = "nothing"
        if rows is not None:
            sample = next(rows.rows())
            parts = [f"{name}={sample[name]!r:.{_SHOWN}}" for name in ("prompt", "text") if name in rows]
            own = sorted(set(rows.columns) - TAKEN - {"prompt"})
            given = (
                f"a stub sample ({', '.join(parts)}) with the columns {', '.join(own)}" if own else f"a stub sample ({', '.join(parts)})"
            )
        now = f"It was given {given}.\n{error.now}\n`m2flow plan --no-try` plans without this call."
        return type(error)(error.what, where=error.where or call.site.describe(), now=now.replace("\n\n", "\n"), remote=error.remote)

    def _say(self, call: Call, line: str) -> None:
        self._send("line", f"{call.site}  {call.name}: {line}")

    def _send(self, kind: str, said: str) -> None:
        self._link.send_bytes(json.dumps([kind, said]).encode())


def _is_built_in(call: Call) -> bool:
    """Whether a call on functions is m2flow's own arithmetic on columns."""
    return call.options.get("style") == "columns" or call_semantics.gives(call) == "concat"


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])


def _shown_value(value: object) -> str:
    """The first row's value of a column, or a single value, shortened."""
    if isinstance(value, Batch):
        if not len(value):
            return "no row"
        column = next(iter(value.columns.values()))
        value = column.item(0) if isinstance(column, Ragged) else np.asarray(column)[0].item()
    return f"{value!r:.{_SHOWN}}"
