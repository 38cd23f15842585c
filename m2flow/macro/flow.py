"""The `@flow` decorator: a flow's parameters, its random state, running it, and loading it from a file."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import linecache
import os
import random
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import overload

import cloudpickle

from m2flow.errors import FlowLoadError, M2FlowError, OptionError, described, did_you_mean
from m2flow.macro.graph import site_of
from m2flow.macro.session import Backend, Session, recording
from m2flow.recipe import MOST_COUNTED


def loaded_torch() -> types.ModuleType | None:
    """Return torch if it is fully imported. Another thread may be importing it (TensorBoard's writer does); then None."""
    torch = sys.modules.get("torch")
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def seed_everything(seed: int) -> None:
    """Seed the generators that a flow's Python may use. Torch only if the flow has loaded it."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = loaded_torch()
    if torch is None:
        return
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)  # `manual_seed` would write down the stack for each kind of device that is not here.
    else:
        torch.manual_seed(seed)


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    """Restore the flow's random generators after engines or users' functions have run in its process."""
    import numpy as np

    states, torch = (random.getstate(), np.random.get_state()), loaded_torch()
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(torch_state)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a flow's function: an option of `m2flow run`."""

    name: str
    type: object
    default: object
    """`inspect.Parameter.empty` if it must be given."""

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, eq=False)
class Flow:
    """A user's function under `@flow`: an RL loop."""

    function: Callable[..., object]
    staleness: int | str = 0
    """Versions that a generate call in the loop may be behind; or the name of the parameter that says it."""

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def doc(self) -> str:
        module = sys.modules.get(self.function.__module__)
        return inspect.getdoc(self.function) or (inspect.getdoc(module) if module else None) or ""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        try:
            hints = typing.get_type_hints(self.function)
        except (NameError, TypeError, SyntaxError) as error:
            raise FlowLoadError(
                f"an annotation of the flow {self.name} can't be read: {error}", now="Import what the annotation names, or take it away."
            ) from None
        found = []
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise FlowLoadError(
                    f"the flow {self.name} has {parameter}; its options must be named parameters",
                    now="Name each option in the signature, in place of *args and **kwargs.",
                )
            default = parameter.default
            guess = str if default in (parameter.empty, None) else type(default)
            found.append(Parameter(name, hints.get(name, guess), default))
        return tuple(found)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)

    def staleness_for(self, options: Mapping[str, object]) -> int:
        """The staleness of a run with these options.

        Raises:
            OptionError: it is no whole number, 0 or more.
        """
        value: object = self.staleness
        if isinstance(value, str):
            default = next(parameter.default for parameter in self.parameters if parameter.name == value)
            value = options.get(value, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNTED:
            source = f"the parameter {self.staleness!r}" if isinstance(self.staleness, str) else "@flow(staleness=...)"
            raise OptionError(f"{source} of the flow {self.name} is {value!r:.60}; a staleness is a whole number of versions, 0 or more")
        return value

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raises OptionError: the flow has no such option, or one is missing that has no default."""
        known = [parameter.name for parameter in self.parameters]
        for name in options:
            if name not in known:
                what = f"the flow {self.name} has no option {name!r}; it has {', '.join(sorted(known)) or 'none'}"
                raise OptionError(what, now=did_you_mean(name, known, ""))
        missing = [parameter.name for parameter in self.parameters if parameter.is_required and parameter.name not in options]
        if missing:
            raise OptionError(
                f"the flow {self.name} needs a value for {', '.join(missing)}",
                now="Give it as --NAME VALUE, in Python as NAME=VALUE, or a default in the flow's signature.",
            )

    def run(
        self,
        backend: Backend,
        options: Mapping[str, object],
        *,
        seed: int = 0,
        max_steps: int | None = None,
        begun: Callable[[Session], None] = lambda session: None,
    ) -> object:
        """Run the function with its calls recorded into the backend, by this `seed`, up to `max_steps` steps; wait for all of them.

        `begun` is given the session before the function runs.
        """
        self.check_options(options)
        seed_everything(seed)
        session = Session(backend, flow=self.name, seed=seed, max_steps=max_steps, staleness=self.staleness_for(options))
        begun(session)
        with recording(session):
            try:
                result = self.function(**options)
                session.finish()
            except (Exception, SystemExit) as error:
                try:
                    backend.raise_due()
                except M2FlowError as due:
                    if isinstance(error, M2FlowError) and (error.what, error.where, error.row) == (due.what, due.where, due.row):
                        raise error from None  # As the program got it and let it pass: it says nothing of errors that a flow caught.
                    raise
                raise
        return result


@overload
def flow(function: Callable[..., object], /) -> Flow: ...


@overload
def flow(*, staleness: int | str = 0) -> Callable[[Callable[..., object]], Flow]: ...


def flow(function: Callable[..., object] | None = None, /, *, staleness: int | str = 0) -> Flow | Callable[[Callable[..., object]], Flow]:
    """Make a function a flow. Its parameters become the options of `m2flow run`.

    Args:
        staleness: versions of the weights that a `generate` in the loop may be behind what this line would have if the calls ran one by
            one; each token records the version that it came from. 0, the default: the calls run as if one by one. More: the next
            responses are generated while an update runs. A text is the name of the flow's parameter that says it.
    Raises:
        FlowLoadError: it is no plain function: its calls would not run when it is called. Or no parameter has the name.
        OptionError: the staleness is no whole number, 0 or more.
    """
    if function is None:
        return lambda decorated: _flow(decorated, staleness)
    return _flow(function, staleness)


_MOST_DECORATORS = 30
"""Lines of them that are read to find the function's own."""


def _flow(function: Callable[..., object], staleness: int | str) -> Flow:
    if not callable(function):
        raise FlowLoadError(f"@flow got a {type(function).__name__} instead of a function", now="Write @flow above a function.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        code = function.__code__
        lines = range(code.co_firstlineno, code.co_firstlineno + _MOST_DECORATORS)
        starts = (line for line in lines if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")))
        place = code.co_filename, next(starts, code.co_firstlineno), function.__name__
        raise FlowLoadError(
            f"the flow {function.__name__} is async or has a yield; a flow is a plain function",
            where=site_of([place]).describe(),
            now="Write it with `def`, without yield: the run makes its calls concurrent.",
        )
    made = Flow(function, staleness)
    if not isinstance(staleness, str):
        made.staleness_for({})
    elif staleness not in inspect.signature(function).parameters:
        raise FlowLoadError(
            f"the flow {function.__name__} has no parameter {staleness!r} to take its staleness from",
            now="Add the parameter to the flow's signature, or give @flow a number.",
        )
    return made


def load_flow(target: str) -> Flow:
    """Load the flow in a file, or `file.py:name` where it has several.

    Raises:
        FlowLoadError: no such file, it can't be imported, or it has no flow or more than one.
    """
    if not isinstance(target, str):
        raise FlowLoadError(f"load_flow got target={target!r:.60}; it takes the path of a file, as a text")
    path_text, _, name = target.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise FlowLoadError(f"there is no file {path_text}", now="Give the path of a Python file with a function decorated with @flow.")
    module = _import(path)
    own = {value: key for key, value in reversed(vars(module).items()) if isinstance(value, Flow)}  # a flow of two names counts once
    flows = {key: value for value, key in reversed(own.items()) if value.function.__module__ == module.__name__}
    if not flows:
        raise FlowLoadError(f"{path_text} has no flow", now="Decorate its loop with @flow (from m2flow import flow).")
    if name and name not in flows:
        raise FlowLoadError(f"{path_text} has no flow {name!r}; it has {', '.join(flows)}")
    if not name and len(flows) > 1:
        raise FlowLoadError(f"{path_text} has {len(flows)} flows: {', '.join(flows)}", now=f"Choose one: {path_text}:{next(iter(flows))}")
    return flows[name] if name else next(iter(flows.values()))


def load_function(target: str) -> Callable[..., object]:
    """Load a function in a file, `file.py:name`, or in a module, `package.module:name`. A class is called without arguments.

    Raises:
        FlowLoadError: there is no such file, module or function, or importing it raised.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise FlowLoadError(f"{target!r} names no function", now="Give FILE.py:FUNCTION, or package.module:FUNCTION.")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise FlowLoadError(f"there is no file {place}", now="Check the path; it is relative to the working directory.")
        module = _import(Path(place))
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise FlowLoadError(
                f"the module {place} can't be imported: {error}", now="Check the module's name, and that it is installed or in PYTHONPATH."
            ) from error
    found: object = getattr(module, name, None)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:
            raise FlowLoadError(
                f"{target} can't be made without arguments: {described(error)}",
                now="Make one in a file of your own, and name that: judge = TheClass(...).",
            ) from error
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise FlowLoadError(f"{place} has no function {name!r}; it has {known or 'none'}")
    return found


class AsItStands(SourceFileLoader):
    """Loads a user's file from its text, never from a compilation that Python has kept.

    Python takes that for the text's own if length and second of change are the same: an edit within a second can go unseen. The lines by
    which calls are known are of that text too: Python keeps a file's lines by its name, and a relative one means another in each directory.
    """

    def __init__(self, name: str, file: str | Path) -> None:
        super().__init__(name, os.path.abspath(file))

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        linecache.cache.pop(path, None)
        return self.source_to_code(self.get_data(path), path)


def _import(path: Path) -> types.ModuleType:
    name = f"m2flow_flow_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FlowLoadError(f"{path} is not a Python file", now="Give a file that ends in .py, as FILE.py or FILE.py:FLOW.")
    spec.loader = loader = AsItStands(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # As for a script: a flow may import what lies beside it.
    cloudpickle.register_pickle_by_value(module)  # No worker could import a module of this made-up name.
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        shown = (error.text or "").rstrip()
        raise FlowLoadError(
            f"syntax error: {error.msg}",
            where=f"{error.filename or path}:{error.lineno}  {shown.strip()}",
            now="Mend that line; `python FILE` shows the same error.",
        ) from error
    except FlowLoadError as error:
        raise error.located(str(path)) from error.__cause__
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == loader.path]
        place = f"{path}:{frames[-1].lineno}  {frames[-1].line}" if frames else str(path)
        now = (
            "A flow's file is run as a script is: write `from rewards import f` for a file beside it, without the dot, or pass the flow of "
        )
        now = f"{now}an imported package to m2flow.run()." if "relative import" in str(error) else ""
        raise FlowLoadError(f"importing the flow raised {described(error)}", where=place, now=now) from error
    return module
