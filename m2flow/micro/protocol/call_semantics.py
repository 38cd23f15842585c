"""Give the meaning of a call in terms of engines, and serialise it for the workers that execute it.

The meaning of a call is requests and rows of generations, inputs and checked results of functions, and reward parts. This is the one place
where a macro call and an engine's contract meet. Workers use these functions chunk by chunk, the eager executor call by call. So a plan
can change when and where something is done, but not what.

Rewards may have parts, which nothing computes with: they go to the ledger and nowhere else, so that rows that are stored, sent or trained
on are the same with and without them.

    {"reward": 0.7, "right": 1.0, "brevity": -0.3} --judged--> Judged(0.7, {"right": 1.0, "brevity": -0.3})
    a task's results --rewards_of--> rows with their parts --without_parts--> rows for others; parts for the ledger

A call is sent as a snapshot of what it was given when the program made it.

    Call --call_body--> bytes --(m.Define)--> call_of --> Call

What m2flow itself put into a call is plain and goes by pickle; only the user's objects take cloudpickle, which is ten times slower. What
the calls of one kind have in common is pickled once and copied into the body of each. A dataset's rows are sent as rows, and what is only
for the printed form is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import pickle
import time
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import cloudpickle
import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import Generated, Request
from m2flow.errors import DatasetError, EngineError, InternalError, M2FlowError, OpError, OptionError, RewardError, TraceError
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import TWICE, Call, CallKind, Effect, Granularity, Ref, Site
from m2flow.recipe import Sampling
from m2flow.samples import (
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    Batch,
    Column,
    Finish,
    Prompt,
    Ragged,
    Sample,
    SampleId,
    Segment,
    column_of,
    keyed_bits,
    offsets_of,
)

# ---- what a call means to an engine


Parts = dict[str, float]
"""Part of a reward -> its value; a reward may have none."""

_REWARD = "reward"
_PARTS = "reward parts"
"""A column name that no dataset or function can have, since it is no identifier."""


class Judged(NamedTuple):
    """A reward function's result on one sample, before it is checked."""

    reward: object
    parts: Mapping[object, object]


def judged(value: object) -> Judged:
    """Split a mapping or dataclass with a `reward` into reward and parts; anything else is the reward itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping) or _REWARD not in value:
        return Judged(value, {})
    return Judged(value[_REWARD], {name: part for name, part in value.items() if name != _REWARD})


def rewards_of(values: Sequence[object]) -> dict[str, Column]:
    """Make the columns of rewards, each a number or a `Judged` of numbers: the rewards, and their parts if any has some."""
    apart = [value if isinstance(value, Judged) else Judged(value, {}) for value in values]
    columns: dict[str, Column] = {_REWARD: np.array([one.reward for one in apart], np.float64)}
    return columns | {_PARTS: Ragged.json([one.parts for one in apart])} if any(one.parts for one in apart) else columns


def without_parts(rows: Batch) -> tuple[Batch, list[Parts]]:
    """Split rows into rows without parts, and the parts of each row's reward; an empty list where none has any."""
    if _PARTS not in rows:
        return rows, []
    parts = rows.ragged(_PARTS)
    found = [dict(parts.item(row)) for row in range(len(rows))]  # type: ignore[call-overload]
    return rows.only([name for name in rows.columns if name != _PARTS]), found


def sample_seed(run_seed: int, role: str, repeat: int, origin: int, index: int) -> int:
    """Compute the 64-bit seed of a sample's random numbers from the draw of its prompt and its place in its group.

    Its call does not count, nor when or where it runs.

    Args:
        repeat: how often the program has had this role answer these prompts before.
        origin: the prompt's `seed`: for a dataset's row which draw it was, for a prompt made from a sample that sample's seed.
        index: the sample's place in its group.
    """
    return keyed_bits(run_seed, role, repeat, origin, index)


def requests(call: Call, ids: Iterable[int], prompts: Batch, run_seed: int) -> list[Request]:
    """Make the requests of a generate call for these samples; row i of `prompts` is the prompt of sample i."""
    repeat = call.options["repeat"]
    assert isinstance(repeat, int)
    texts, origins = prompts.ragged("prompt"), prompts.dense("seed").tolist()
    return [
        Request(
            id=packed,
            prompt=cast(Prompt, texts.item(row)),
            seed=sample_seed(run_seed, call.role, repeat, origins[row], SampleId.unpack(packed).index),
            sampling=_sampling(call, prompts, row),
        )
        for row, packed in enumerate(ids)
    ]


def continuations(call: Call, stopped: Batch) -> list[Request]:
    """Make the requests for stopped samples of a call: each continues from the tokens in its row."""
    made = []
    for row, packed in enumerate(stopped.ids.tolist()):
        lengths = stopped.ragged("segment_lengths").row(row)
        num_prompt = int(lengths[0]) if len(lengths) else 0
        tokens, logprobs, versions, stale = (stopped.ragged(name).row(row).tolist() for name in _MADE)
        made.append(
            Request(
                id=packed,
                prompt=tuple(tokens[:num_prompt]),
                seed=int(stopped.dense("seed")[row]),
                sampling=_sampling(call, stopped, row),
                prefix=tuple(tokens[num_prompt:]),
                prefix_logprobs=tuple(logprobs[num_prompt:]),
                prefix_versions=tuple(versions[num_prompt:]),
                prefix_kv_stale=tuple(stale[num_prompt:]),
                prompt_text=str(stopped.ragged(_PROMPT_TEXT).item(row)) if _PROMPT_TEXT in stopped else None,
                prefix_masks=tuple(stopped.ragged(SAMPLING_MASK).row(row).tolist()) if SAMPLING_MASK in stopped else (),
            )
        )
    return made


_PROMPT_TEXT = "prompt_text"
"""Column of what the model saw of a prompt, where a chat template made it."""
_MADE = ("tokens", "logprobs", "versions", "kv_stale")


def responses(calls: Sequence[Call], generated: Sequence[Generated], prompts: Batch, seeds: Mapping[int, int]) -> Batch:
    """Make the rows of generated samples: token columns, and the columns of each one's prompt.

    Args:
        calls: the call that drew each sample.
        prompts: row i is the prompt of sample i or, where it continued, its earlier row.
    """
    ids = np.array([g.id for g in generated], np.int64)
    num_prompt = [len(g.prompt_tokens) for g in generated]
    # All rows at once: running episodes are written down, whole, several times for each of their turns.
    offsets = offsets_of([prompt + len(g.tokens) for prompt, g in zip(num_prompt, generated, strict=True)])
    of_segments = offsets_of([1 + (len(g.segments) or 1) for g in generated])
    segments = [
        segment
        for g, prompt in zip(generated, num_prompt, strict=True)
        for segment in ((_PROMPT, prompt), *(g.segments or ((_GENERATED, len(g.tokens)),)))
    ]
    kinds = np.array([kind for kind, _ in segments], np.uint8)
    lengths = np.array([count for _, count in segments], np.int32)

    def column(name: str, blank: float, dtype: type) -> Ragged:
        blanks: npt.NDArray[Any] = np.full(max(num_prompt, default=0), blank, dtype)
        parts = [part for prompt, g in zip(num_prompt, generated, strict=True) for part in (blanks[:prompt], getattr(g, name))]
        return Ragged(_joined(parts, dtype), offsets)

    columns: dict[str, Column] = {
        "tokens": Ragged(_joined([part for g in generated for part in (g.prompt_tokens, g.tokens)], np.int32), offsets),
        "loss_mask": Ragged(np.repeat(kinds == _GENERATED, lengths), offsets),
        "logprobs": column("logprobs", 0.0, np.float32),
        "versions": column("versions", -1, np.int32),
        "kv_stale": column("kv_stale", False, np.bool_),
        "segment_kinds": Ragged(kinds, of_segments),
        "segment_lengths": Ragged(lengths, of_segments),
        "seed": np.array([seeds[g.id] for g in generated], np.uint64),
        "finish": np.array([g.finish for g in generated], np.uint8),
        "temperature": np.array([_sampling(call, prompts, row).temperature or 1.0 for row, call in enumerate(calls)], np.float64),
        "text": Ragged.texts([g.text for g in generated]),
    }
    given = prompts.ragged("prompt")
    # A function of the call, not of these samples alone, since rows of a call are brought together.
    if given.kind == "json" or any(g.prompt_text is not None or g.columns for g in generated):
        texts = [given.item(row) if g.prompt_text is None else g.prompt_text for row, g in enumerate(generated)]
        columns[_PROMPT_TEXT] = Ragged.texts([str(text) for text in texts])
    routed = [g.routed_experts for g in generated if g.routed_experts is not None]
    if routed:
        columns[ROUTED_EXPERTS] = Ragged.of(routed, routed[0].dtype)
    if any(isinstance(sampling := call.options["sampling"], Sampling) and sampling.sampling_mask for call in calls):
        columns[SAMPLING_MASK] = Ragged.of([_mask_of(g) for g in generated], np.int32)
    for name in generated[0].columns if generated else ():
        values = [g.columns[name] for g in generated]
        columns[name] = Ragged.json(values) if name == "episode" else column_of(values, name)
    return Batch(ids, {**prompts.columns, **columns})


_PROMPT, _GENERATED = int(Segment.PROMPT), int(Segment.GENERATED)


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.zeros(0, dtype)


def _mask_of(generated: Generated) -> npt.NDArray[np.int32]:
    if generated.sampling_mask is None:
        what = f"the rollout engine did not say what the tokens of sample {SampleId.unpack(generated.id)} were drawn from"
        raise EngineError(what, now="Leave sampling_mask= out.")
    return generated.sampling_mask


def _sampling(call: Call, rows: Batch, row: int) -> Sampling:
    """Return the parameters of the sample whose prompt this row is.

    Raises:
        DatasetError: its column has no temperature.
    """
    sampling = call.options["sampling"]
    assert isinstance(sampling, Sampling)
    if not sampling.temperature_of:
        return sampling
    column = rows.columns[sampling.temperature_of]
    value: Any = column.item(row) if isinstance(column, Ragged) else column[row].item()
    try:
        return replace(sampling, temperature=value, temperature_of="")
    except OptionError as error:
        raise DatasetError(
            f"{call.name} takes temperatures from the column {sampling.temperature_of!r}: {error.what}",
            now="Put a number above 0, or 0 for greedy, in that column of each row.",
        ) from None


def function_of(call: Call) -> Callable[..., object]:
    """Return the function of a call on functions."""
    function = call.options["function"]
    if not callable(function):
        raise InternalError(f"{call.name} has no function")
    return function


def function_error(call: Call, error: OpError) -> OpError:
    """Turn the error of a reward function into a `RewardError`; other functions' errors stay."""
    if call.options["column"] != "reward" or isinstance(error, RewardError):
        return error
    now = error.now or "Mend it, or catch the error in the reward and return 0.0 for what can't be judged, so that it is counted."
    if call.method == "score" and error.now:
        now += "\nReward(..., on_error=0.0) counts such a sample as that and goes on; the number of them is reported."
    found = RewardError(error.what.replace("the function", "the reward function", 1), where=error.where, now=now, remote=error.remote)
    found.row = error.row
    return found


def gives(call: Call) -> str:
    """Return what a function's result is: `column`, `rows`, `kept` or `concat` (see `m2flow.macro.graph.Call`)."""
    return str(call.options.get("gives", "column"))


def function_input(call: Call, inputs: Mapping[str, Batch]) -> Batch:
    """Join the rows that a function works on: its first input with rows, and by identity a column of each further one.

    Of a further input, the column that the call's option `columns` names is joined under the input's name; where it names none, all
    columns are joined under their own names.
    """
    named = call.options.get("columns", {})
    assert isinstance(named, Mapping)
    if gives(call) == "concat":
        batches = [batch for batch in inputs.values() if len(batch)]
        fields = call.options.get("fields")  # The same for every chunk, whichever inputs' rows are in it.
        shared = set.intersection(*(set(batch.columns) for batch in batches)) if batches else set()
        shared &= set(fields) if isinstance(fields, tuple) else shared
        rows = Batch.concat([batch.only(sorted(shared)) for batch in batches]).in_order()
        again = np.flatnonzero(np.diff(rows.ids) == 0)
        if len(again):
            raise OpError(f"{call.name} got sample {SampleId.unpack(int(rows.ids[again[0]]))} twice", now=TWICE)
        return rows
    if not inputs or not len(next(iter(inputs.values()))):
        return Batch(np.zeros(0, np.int64))  # Without rows there are no columns either.
    (first, rows), *others = inputs.items()
    rows = rows.in_order()
    if first in named:
        rows = rows.with_columns(**{first: _column(call, rows, named[first])})
    for name, other in others:
        found = other.select(rows.ids)
        rows = rows.with_columns(**({name: _column(call, found, named[name])} if name in named else found.columns))
    return rows


def _column(call: Call, rows: Batch, name: str) -> Column:
    if name not in rows:
        known = ", ".join(sorted(rows.columns))
        raise OpError(f"{call.name} needs the column {name!r}, which its rows do not have", now=f"They have {known}.")
    return rows[name]


def columns_result(call: Call, inputs: Mapping[str, Batch], rows: Batch, result: object) -> Batch | object:
    """Check the result of a function on columns, and return it as rows: a column, rows, the kept rows of the first input, or one value."""
    if not call.is_aligned:
        return result
    kind = gives(call)
    if kind == "rows":
        if not isinstance(result, Batch) or not np.array_equal(result.ids, rows.ids):
            raise InternalError(f"{call.name} must return a batch of the same samples")
        return result
    if not isinstance(result, np.ndarray | Ragged) or len(result) != len(rows):
        raise InternalError(f"{call.name} must return a column of {len(rows)} rows")
    return (
        kept_rows(next(iter(inputs.values())).in_order(), result)
        if kind == "kept"
        else Batch(rows.ids, {str(call.options["column"]): result})
    )


def kept_rows(rows: Batch, is_kept: object) -> Batch:
    """Select the rows whose value is true."""
    values = is_kept.values if isinstance(is_kept, Ragged) else np.asarray(is_kept)
    return rows.take(np.flatnonzero(np.asarray(values, bool)))


def checked(call: Call, function: Callable[..., object], took_ns: list[int] | None = None) -> Callable[..., object]:
    """Wrap a user's function so that its result on a unit is checked before the next unit is run.

    So of several errors the earliest sample's counts, whether the function raised or returned a wrong value.

    Args:
        took_ns: list to which the duration of each unit is appended, in the order of their ends.
    """
    took = took_ns if took_ns is not None else []

    @functools.wraps(function, assigned=("__name__", "__qualname__"), updated=())
    def run(unit: Sample | list[Sample]) -> object:
        start = time.monotonic_ns()
        result = function(unit)
        if inspect.isawaitable(result):
            return later(unit, result, start)
        took.append(time.monotonic_ns() - start)
        return _checked(call, unit, result)

    async def later(unit: Sample | list[Sample], result: Awaitable[object], start: int) -> object:
        found = await result
        took.append(time.monotonic_ns() - start)
        return _checked(call, unit, found)

    return run


def function_rows(call: Call, rows: Batch, results: Sequence[object]) -> Batch:
    """Make rows from the results of a `checked` function on samples or groups."""
    values = [value for group in results for value in group] if call.granularity is not Granularity.SAMPLE else results  # type: ignore[attr-defined]
    column = str(call.options["column"])
    if gives(call) == "kept":
        return kept_rows(rows, values)
    return Batch(rows.ids, rewards_of(values) if column == "reward" else {column: Ragged.json(values)})


def _checked(call: Call, unit: Sample | list[Sample], result: object) -> object:
    """Check a result: one value for a sample, or a list with one for each sample of a group.

    Raises:
        RewardError, OpError: it is something else; the error names the sample.
    """
    if not call.is_aligned:
        return result
    if isinstance(unit, Sample):
        return _checked_value(call, unit.id, result)
    values = as_python(result)
    if not isinstance(values, list | tuple) or len(values) != len(unit):
        if not unit:
            raise OpError(f"{call.name} returned {values!r:.80} for no samples", now="It returns an empty list for these.")
        first, last = unit[0].id, unit[-1].id
        named = f"the group of prompt {first.prompt}" if call.granularity == "group" else f"the {call.granularity} {first} to {last}"
        named = named.replace("minibatch", "mini-batch")
        what = f"{call.name} returned {values!r:.80} for {named}, which has {len(unit)} samples"
        raise _fault(call, first, what, f"An op on a {call.granularity} returns a list with one value for each sample.")
    return [_checked_value(call, sample.id, value) for sample, value in zip(unit, values, strict=True)]


def _checked_value(call: Call, sample: SampleId, value: object) -> object:
    if gives(call) == "kept":
        if isinstance(value, bool | np.bool_):
            return bool(value)
        on = f"sample {sample}" if call.granularity is Granularity.SAMPLE else f"the group of prompt {sample.prompt}"
        what = f"{call.name} returned {value!r:.80} on {on}, which is neither True nor False"
        raise _fault(
            call, sample, what, f"A filter's function says of each {call.granularity} whether it stays: True or False, or bool(...)."
        )
    misfit = _fields_fault(call, value)
    if misfit:
        raise _fault(call, sample, f"{call.name} returned {value!r:.80} on sample {sample}", misfit)
    if call.options["column"] == "reward":
        return _checked_reward(call, sample, value)
    plain = as_python(value)
    if type(plain) in (float, bool, str) or (type(plain) is int and plain.bit_length() <= 64):
        return plain  # JSON has all of these.
    try:
        json.dumps(plain)
    except (TypeError, ValueError, RecursionError) as error:
        what = f"{call.name} returned a {type(plain).__name__} on sample {sample}, which can't travel: {error}"
        raise _fault(call, sample, what, "An op returns numbers, texts, None, or lists and dicts of them.") from None
    return plain


def _checked_reward(call: Call, sample: SampleId, value: object) -> float | Judged:
    reward, parts = judged(value) if gives_reward(call) else Judged(value, {})
    if not _is_finite(reward):
        shown = f"{reward!r:.80}" if isinstance(reward, int | float | np.number) else f"{type(reward).__name__}: {reward!r:.80}"
        now = "A reward is one finite number. Return 0.0 for what can't be judged, so that it is counted."
        if reward is None:
            now = "A reward is one finite number: see that the function returns one at every end, 0.0 for what can't be judged."
        elif hasattr(reward, "tolist") and not isinstance(reward, np.number):
            now = "A reward is one finite number: of an array or a tensor with one value, return float(...)."
        elif isinstance(reward, Mapping) and gives_reward(call):
            now = 'A reward that says what it is made of returns {"reward": 0.7, "right": 1.0, ...}: the number that counts, and its parts.'
        raise _fault(call, sample, f"the reward {call.role} returned {shown} on sample {sample}", now)
    if not parts:
        return float(reward)  # type: ignore[arg-type]
    for name, part in parts.items():
        if not isinstance(name, str) or not name.isprintable() or not name:
            what = f"the reward {call.role} returned a part named {name!r:.80} on sample {sample}"
            raise _fault(call, sample, what, "The parts of a reward have names: texts on one line.")
        if not _is_finite(part):
            what = f"the reward {call.role} returned {part!r:.80} for its part {name!r} on sample {sample}"
            raise _fault(call, sample, what, "A part of a reward is one finite number, too.")
    return Judged(float(reward), {name: float(part) for name, part in parts.items()})  # type: ignore[arg-type]


def _fault(call: Call, sample: SampleId, what: str, now: str) -> M2FlowError:
    kind = RewardError if call.options["column"] == "reward" else OpError
    return kind(what, now=now).about(sample.pack())


def _is_finite(value: object) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # An int beyond the range of floats.
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating)


def plain_value(call: Call, value: object) -> dict[str, float] | float | str | None:
    """Convert an op's single value to one that can be sent to the controller.

    Raises:
        OpError: it is neither a number, a text, nor a mapping of numbers.
    """
    misfit = _fields_fault(call, value)
    if misfit:
        raise OpError(f"{call.name} returned {value!r:.80}", now=misfit)
    if isinstance(value, dict) and all(_is_number(number) for number in value.values()):
        return {str(key): float(number) for key, number in value.items()}
    value = as_python(value)
    if value is None or isinstance(value, int | float | str):
        return value
    raise OpError(f"{call.name} returned a {type(value).__name__}", now="An op on a batch returns a number, a text, or a dict of numbers.")


def _fields_fault(call: Call, value: object) -> str:
    """Describe what is wrong with a mapping's fields, if the call declares some; empty if nothing is."""
    fields = call.options.get("fields", ())
    assert isinstance(fields, tuple)
    is_right = not fields or (isinstance(value, dict) and set(value) == set(fields))
    return "" if is_right else f"It declares a mapping of {', '.join(fields)}, these and no others."


def gives_reward(call: Call) -> bool:
    """Whether a call's result is the reward of each sample (also a sum of several, `Reward.sum`), and not a number computed from it."""
    return call.method == "score" or (call.options.get("column") == "reward" and ("instance" in call.options or call.method == "sum"))


def as_python(value: object) -> object:
    """Convert arrays and scalars of NumPy, torch and the like to numbers and lists; return all else as it is."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def num_tokens_of(batch: Batch) -> list[int]:
    """Count all tokens of each row; for rows without tokens predict them from their texts: one a byte."""
    if "tokens" in batch:
        return [int(n) for n in batch.ragged("tokens").lengths]
    lengths = sum((batch.ragged(name).lengths for name in ("prompt", "target") if name in batch), np.ones(len(batch), np.int64))
    return [int(n) for n in lengths]


def num_generated_of(batch: Batch) -> list[int]:
    """Count the generated tokens of each row; 0 for rows without tokens."""
    if "segment_lengths" not in batch:
        return [0] * len(batch)
    kinds, lengths = batch.ragged("segment_kinds"), batch.ragged("segment_lengths").values
    before = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.where(kinds.values == _GENERATED, lengths, 0), out=before[1:])
    return [int(count) for count in np.diff(before[kinds.offsets])]


def num_noted_of(rows: Batch) -> list[int]:
    """Count what each row's record has of its tool calls: each that began, and each that returned. 0 for rows that are no episodes."""
    if "episode" not in rows:
        return [0] * len(rows)
    records: Any = rows.ragged("episode")
    tools = [records.item(row)["tools"].values() for row in range(len(rows))]
    return [sum(1 + ("result" in noted) for noted in of) for of in tools]


def lengths_of(rows: Batch) -> tuple[list[int], list[int]]:
    """Count the tokens of each row: all, and the generated ones."""
    return num_tokens_of(rows), num_generated_of(rows)


def finish_of(batch: Batch) -> list[int]:
    """Return why each row's generation ended (`Finish`)."""
    return [int(f) for f in batch.dense("finish")] if "finish" in batch else [int(Finish.STOP)] * len(batch)


def span_attributes(call: Call) -> dict[str, object]:
    """Return the attributes that identify a call in its spans."""
    return {"call": call.ordinal, "flow_line": str(call.site), "label": call.name, "step": call.step}


# ---- the call as workers get it


_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def call_body(call: Call) -> bytes:
    """Serialise a call.

    Raises:
        TraceError: something in the call can't be sent to another process.
    """
    kind = call.kind
    if kind is None:
        kind = call.only_kind
        common = _common_body(kind, call)
    else:
        found = _commons.get(id(kind))
        if found is None:
            if len(_commons) >= _MOST_KINDS:
                _commons.clear()
            found = _commons[id(kind)] = kind, _common_body(kind, call)
        common = found[1]
    changing = None
    if len(call.options) != len(kind.options):
        changing = _options_body(call, {name: value for name, value in call.options.items() if name not in kind.options})
    return pickle.dumps(
        (
            common,
            call.ordinal,
            [ref.call for _, ref in call.inputs],
            changing,
            [(effect.version, effect.oldest) for effect in call.reads],
            [effect.version for effect in call.writes],
            call.step,
        ),
        pickle.HIGHEST_PROTOCOL,
    )


_MOST_KINDS = 4096
_commons: dict[int, tuple[CallKind, bytes]] = {}
"""id(kind) -> the kind, held so that its id is not reused, and what the bodies of its calls have in common."""


def _common_body(kind: CallKind, call: Call) -> bytes:
    site = kind.site
    return pickle.dumps(
        (
            (kind.role, kind.method, kind.engine, str(kind.granularity)),
            kind.inputs,
            _options_body(call, kind.options),
            kind.reads,
            kind.writes,
            (site.file, site.line, site.text, site.path),
            kind.is_aligned,
        ),
        pickle.HIGHEST_PROTOCOL,
    )


def _options_body(call: Call, options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, bytes]]:
    """Split options into plain values and pickled ones: the user's objects, and functions that many calls share."""
    plain: dict[str, object] = {}
    by_value: dict[str, bytes] = {}
    try:
        for name, value in options.items():
            if type(value) in _ATOMS:
                plain[name] = value
            elif isinstance(value, Snapshot) and value.is_fixed:
                by_value[name] = _body_of(value)
            elif name == "rows":
                pass
            elif _is_plain(value):
                plain[name] = value
            else:
                by_value[name] = cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{call.name} can't be sent to a worker: {error}",
            where=call.site.describe(),
            now="Its function captures a lock, a file, a generator or the like. Make that inside the function.",
        ) from None
    return plain, by_value


@functools.lru_cache(maxsize=256)
def _body_of(function: Snapshot) -> bytes:
    return pickle.dumps(function, pickle.HIGHEST_PROTOCOL)


def call_of(body: bytes) -> Call:
    """Deserialise a call; its functions are new ones each time, with captures of their own."""
    common, ordinal, inputs, changing, reads, writes, step = pickle.loads(body)
    (role, method, engine, granularity), names, options, read, written, site, is_aligned = pickle.loads(common)
    return Call(
        ordinal=ordinal,
        role=role,
        method=method,
        engine=engine,
        granularity=Granularity(granularity),
        inputs=tuple([(name, Ref(made)) for name, made in zip(names, inputs, strict=True)]),
        options={**_options_of(options), **(_options_of(changing) if changing is not None else {})},
        reads=tuple([Effect(resource, *versions) for resource, versions in zip(read, reads, strict=True)]),
        writes=tuple([Effect(resource, version) for resource, version in zip(written, writes, strict=True)]),
        site=Site(*site),
        step=step,
        is_aligned=is_aligned,
    )


def _options_of(body: tuple[dict[str, object], dict[str, bytes]]) -> dict[str, object]:
    plain, by_value = body
    return plain | {name: pickle.loads(value) for name, value in by_value.items()}


def _is_plain(value: object) -> bool:
    """Whether plain pickle suffices: the value is made of atoms, containers, and instances and functions of m2flow."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if kind is dict:
        return _ATOMS.issuperset(map(type, value)) and all(map(_is_plain, value.values()))  # type: ignore[call-overload, attr-defined]
    if kind is types.FunctionType:
        return _is_ours(value)
    if not _is_ours(kind):  # type: ignore[arg-type]  # mypy takes the hash of a class for that of its instances
        return False
    return hasattr(value, "__dict__") and all(map(_is_plain, vars(value).values()))


@functools.lru_cache(maxsize=1024)
def _is_ours(value: object) -> bool:
    """Whether a function or a class is m2flow's, and can be imported by its name."""
    return str(getattr(value, "__module__", "")).startswith("m2flow.") and "<" not in str(getattr(value, "__qualname__", "<"))
