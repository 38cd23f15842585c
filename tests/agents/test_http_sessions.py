"""Agents that speak HTTP: their requests are turns of the episode, whatever their clients do."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from played_episodes import SPEC, begun, host, played, row_of, start_of, stopped_row, whole
from scripted_model import CALL, Script, chat_of
from tiny_models import byte_tokenizer

from m2flow import Chat, Dataset, Policy, Sample, agent, endpoint, flow, steps, tool
from m2flow.agents.chat import Asked, Reply
from m2flow.agents.episodes import EpisodeStart
from m2flow.agents.http_sessions import Endpoint, _Server, shared_endpoint
from m2flow.agents.tools import EpisodeFailed, EventLoop
from m2flow.engines.contract import Language
from m2flow.engines.models.model_files import TextCodec
from m2flow.errors import OptionError
from m2flow.recipe import AdamW, ChatTemplate
from m2flow.recipe import Episodes as Bounds
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}
NO_CLIENT = "the package {} is not installed; the extra serve-tests has it"
ASKS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]


Work = Callable[[Endpoint, httpx.AsyncClient], Awaitable[Any]]


def served(chat: Chat, work: Work) -> Any:
    """What `work` gives with the address of an episode and a client."""

    async def run() -> Any:
        async with endpoint(chat) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            return await work(server, client)

    return asyncio.run(run())


async def completed(client: httpx.AsyncClient, messages: Sequence[object], *, retry: int = 0, **more: object) -> dict[str, Any]:
    headers = {"x-stainless-retry-count": str(retry)}
    answer = await client.post("/chat/completions", json={"model": "any", "messages": messages, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_turns_by_http_are_the_tokens_of_the_same_turns_by_chat(language: Language) -> None:
    script, by_hand = Script(language, [CALL, "3"]), Script(language, [CALL, "3"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[dict[str, Any]]:
        first = await completed(client, ASKS, tools=[ADD], temperature=0.3, seed=5)
        said = first["choices"][0]["message"]
        result = {"role": "tool", "content": "3 <|im_end|>", "tool_call_id": said["tool_calls"][0]["id"]}
        return [first, await completed(client, [*ASKS, said, result], tools=[ADD])]

    first, second = served(chat_of(script), work)
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    call = first["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1, "b": 2})
    assert second["choices"][0]["message"]["content"] == "3"
    assert second["choices"][0]["finish_reason"] == "stop"
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]

    @tool(replay="pure")
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return "3 <|im_end|>"

    async def hand() -> None:
        chat = chat_of(by_hand)
        turn = await chat.say(ASKS, tools=[add])
        await chat.reply(turn.calls)

    asyncio.run(hand())
    assert [(one.name, list(one.ids)) for one in script.asked] == [(one.name, list(one.ids)) for one in by_hand.asked]


def test_a_retry_is_answered_with_the_turn_that_is_under_way_and_the_same_request_again_with_another(language: Language) -> None:
    script = Script(language, ["one"], delay_s=0.4)

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[str]:
        with pytest.raises(httpx.TimeoutException):
            await client.post("/chat/completions", json={"model": "m", "messages": ASKS}, timeout=0.1)
        again = await completed(client, ASKS, retry=1)
        late = await completed(client, ASKS, retry=2)
        other = await completed(client, ASKS)
        return [one["choices"][0]["message"]["content"] for one in (again, late, other)]

    assert served(chat_of(script), work) == ["one", "one", "one"]
    assert [one.name for one in script.asked] == ["main", script.asked[1].name]
    assert script.asked[1].name.startswith("http-")


def test_a_turn_whose_client_has_gone_ends_before_the_episode_does(language: Language) -> None:
    script = Script(language, ["one"], delay_s=0.3)
    chat = chat_of(script)

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.TimeoutException):
            await client.post("/chat/completions", json={"model": "m", "messages": ASKS}, timeout=0.1)

    served(chat, work)
    assert chat.messages[-1] == {"role": "assistant", "content": "one"}


def test_concurrent_requests_begin_conversations_whose_names_do_not_go_by_their_arrival(language: Language) -> None:
    found = []
    for order in ((1, 2, 3), (3, 1, 2)):
        script = Script(language, ["yes"], delay_s=0.05)

        async def work(server: Endpoint, client: httpx.AsyncClient, order: tuple[int, ...] = order) -> None:
            await completed(client, ASKS)
            await asyncio.gather(*(completed(client, [{"role": "user", "content": f"{n}?"}]) for n in order))

        served(chat_of(script), work)
        found.append({one.name: list(one.ids) for one in script.asked})
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_a_history_that_was_changed_begins_another_conversation(language: Language) -> None:
    script = Script(language, ["one", "two"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        said = (await completed(client, ASKS))["choices"][0]["message"]
        changed = {**said, "content": said["content"].upper()}
        await completed(client, [*ASKS, changed, {"role": "user", "content": "and?"}])
        await completed(client, [*ASKS, said, {"role": "user", "content": "and?"}])

    served(chat_of(script), work)
    first, other, third = script.asked
    assert (first.name, third.name) == ("main", "main")
    assert other.name != "main"
    assert other.begins
    assert "ONE" in (other.prompt_text or "")
    assert not third.begins


@pytest.mark.parametrize("change", [str.strip, "\n{}  ".format, str.lstrip], ids=["strip", "pad", "lstrip"])
def test_white_space_around_the_models_texts_does_not_matter_and_its_tokens_stay(change: Callable[[str], str], language: Language) -> None:
    found = []
    for how in (str, change):
        script = Script(language, ["\n\n one\n", " " + CALL, "\nthree "])

        async def work(server: Endpoint, client: httpx.AsyncClient, how: Callable[[str], str] = how) -> None:
            messages: list[object] = list(ASKS)
            for _ in range(3):
                said = (await completed(client, messages, tools=[ADD]))["choices"][0]["message"]
                calls = said.get("tool_calls") or []
                more = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in calls] or [ASKS[1]]
                messages += [{**said, "content": how(said["content"] or "")}, *more]

        chat = chat_of(script)
        served(chat, work)
        assert chat.messages[2]["content"] == "\n\n one\n"
        found.append([(one.name, list(one.ids)) for one in script.asked])
    assert found[0] == found[1]
    assert {name for name, _ in found[0]} == {"main"}


def test_white_space_tells_conversations_apart_where_nothing_else_does(language: Language) -> None:
    class Spaced(Script):
        async def turn(self, asked: Asked) -> Reply:
            self.texts = [" " * len(self.asked) + "one", "two"]
            return await super().turn(asked)

    script = Spaced(language, [])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await completed(client, ASKS)
        for said in ("one ", " one", "one ", "one"):
            await completed(client, [*ASKS, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}])

    served(chat_of(script), work)
    first, second, either, third, again, fourth = script.asked
    assert (either.begins, again.begins) == (True, True), "it may be either, whether they have gone on or not"
    assert (first.name, third.name, fourth.name) == ("main", second.name, "main"), "the one in which it was said exactly so"


def test_a_stream_says_what_a_whole_answer_says_and_a_client_that_breaks_off_leaves_its_turn(language: Language) -> None:
    script = Script(language, [CALL, "done"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[dict[str, Any]]:
        chunks = []
        body = {"model": "m", "messages": ASKS, "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunks.append(json.loads(line[6:]))
        async with client.stream("POST", "/chat/completions", json={**body, "messages": [{"role": "user", "content": "x"}]}) as answer:
            pass  # It reads nothing of it.
        return chunks

    chunks = served(chat_of(script), work)
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["add"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert len(script.asked) == 2


class Slow(Script):
    """Says its text one token after the other, each when it is told to go on or has waited; a listener hears of all tokens so far."""

    def __init__(self, language: Language, texts: Sequence[str], *, fails_at: int = -1, waits_s: float = 30.0) -> None:
        super().__init__(language, texts)
        self.go_on, self.fails_at, self.waits_s = asyncio.Semaphore(0), fails_at, waits_s
        self.said: list[int] = []

    async def turn(self, asked: Asked) -> Reply:
        reply = await super().turn(asked)
        self.said = []
        for at, token in enumerate(reply.tokens):
            self.said.append(token)
            if asked.heard is not None:
                asked.heard(self.said, self.language.decode(self.said))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.go_on.acquire(), self.waits_s)
            if at == self.fails_at:
                raise EpisodeFailed("turn_timed_out", "a turn took longer than 1 s")
        return reply


STREAMS = {
    "chat/completions": ("messages", lambda event: event.get("choices", [{}])[0].get("delta", {}).get("content") or ""),
    "responses": ("input", lambda event: event["delta"] if event["type"] == "response.output_text.delta" else ""),
    "messages": ("messages", lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""),
}


async def streamed(client: httpx.AsyncClient, path: str, script: Slow, **more: object) -> tuple[list[str], list[dict[str, Any]]]:
    """The pieces of text, each of which had to be there before the script said more; and all events."""
    name, text_of = STREAMS[path]
    pieces, events = list[str](), list[dict[str, Any]]()
    body = {"model": "m", name: [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 200, **more}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    async with client.stream("POST", f"/{path}", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if "error" not in events[-1] and (text := text_of(events[-1])):
                    assert script.language.decode(script.said).startswith("".join([*pieces, text]))
                    pieces.append(text)
            script.go_on.release()
    return pieces, events


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_has_the_text_as_it_is_generated_and_in_all_the_text_of_the_turn(path: str, language: Language) -> None:
    script = Slow(language, ["The answer, which is long, is 3."])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> tuple[list[str], list[dict[str, Any]]]:
        return await streamed(client, path, script)

    pieces, events = served(chat_of(script), work)
    assert "".join(pieces) == "The answer, which is long, is 3."
    assert len(pieces) > 3
    if path == "messages":
        assert events[0]["message"]["usage"]["input_tokens"] == len(script.asked[0].ids)


def test_a_stream_holds_back_what_may_be_a_tool_call_or_a_stop_text(language: Language) -> None:
    def heard(says: str, **more: object) -> tuple[list[str], list[dict[str, Any]]]:
        script = Slow(language, [says], waits_s=0.1)
        return served(chat_of(script), lambda server, client: streamed(client, "chat/completions", script, **more))  # type: ignore[no-any-return]

    said, events = heard("Let me see. " + CALL, tools=[ADD])
    assert "".join(said) == "Let me see."
    assert len(said) > 1
    (call,) = [call for one in events for choice in one["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    text, _ = heard("one two four five six seven", stop=["two three"])
    assert "".join(text) == "one two four five six seven"
    assert len(text) > 1
    assert len(text[-1]) >= len("two thre"), "what may become the stop text comes when it can't any more"


@pytest.mark.parametrize("path", STREAMS)
def test_a_turn_that_fails_in_a_stream_has_a_status_before_its_first_piece_and_an_event_after_it(path: str, language: Language) -> None:
    async def run(fails_at: int) -> tuple[list[str], list[dict[str, Any]]]:
        found: list[Any] = []
        script = Slow(language, ["The answer is 3."], fails_at=fails_at)
        with pytest.raises(EpisodeFailed, match="took longer"):
            async with endpoint(chat_of(script)) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
                found.append(await streamed(client, path, script))
        return found[0]  # type: ignore[no-any-return]

    pieces, events = asyncio.run(run(4))
    assert "".join(pieces)
    assert "The answer is 3.".startswith("".join(pieces))
    assert events[-1]["error"]["code"] == "turn_timed_out"

    async def at_once() -> int:
        script = Slow(language, ["x"])
        name, _ = STREAMS[path]
        async with endpoint(chat_of(script, max_turns=0)) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            answer = await client.post(f"/{path}", json={"model": "m", name: ASKS[1:], "stream": True, "max_tokens": 5})
            return answer.status_code

    with pytest.raises(EpisodeFailed, match="has had its 0 turns"):
        asyncio.run(at_once())


class Held(Script):
    """Its turns wait until they are let go."""

    def __init__(self, language: Language, texts: Sequence[str]) -> None:
        super().__init__(language, texts)
        self.is_let_go = asyncio.Event()

    async def turn(self, asked: Asked) -> Reply:
        reply = await super().turn(asked)
        await self.is_let_go.wait()
        return reply


async def gives_up(server: Endpoint, body: object, *, timeout_s: float = 0.3) -> None:
    """Ask with a plain client of its own, which times out."""

    def asks() -> None:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=timeout_s, trust_env=False)

    await asyncio.to_thread(asks)


def said_in(answer: httpx.Response) -> str:
    """The text of an answer, whole or streamed."""
    assert answer.status_code == 200, answer.text
    if not answer.text.startswith("data: "):
        return str(answer.json()["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("streams", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_client_that_timed_out_and_repeats_its_request_takes_one_turn_without_saying_that_it_is_a_retry(
    is_under_way: bool, streams: tuple[bool, bool], language: Language
) -> None:
    script = Held(language, ["one", "two"])
    chat = chat_of(script, max_conversations=2)
    first, again = ({"model": "m", "messages": ASKS, "stream": is_streamed} for is_streamed in streams)

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[str]:
        for _ in range(3):
            await gives_up(server, first)
        if is_under_way:
            asyncio.get_running_loop().call_later(0.2, script.is_let_go.set)
        else:
            script.is_let_go.set()
            while len(chat.messages) < 3:
                await asyncio.sleep(0.01)
        found = [said_in(await client.post("/chat/completions", json=again)) for _ in range(2)]
        more = [*ASKS, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and?"}]
        return [*found, said_in(await client.post("/chat/completions", json={**again, "messages": more}))]

    assert served(chat, work) == ["one", "one", "two"]
    assert [one.begins for one in script.asked] == [True, True, False], "what was asked after a whole answer is new"


async def break_off(client: httpx.AsyncClient, body: object, script: Slow, piece: str) -> None:
    """Read a stream until a piece has come, and go; the rest is generated then."""
    async with client.stream("POST", "/chat/completions", json=body) as answer:
        lines = answer.aiter_lines()
        while f'"content": "{piece}"' not in await anext(lines):
            script.go_on.release()
    for _ in range(200):
        script.go_on.release()


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_stream_that_was_broken_off_is_taken_up_by_the_same_request_and_by_no_other(is_under_way: bool, language: Language) -> None:
    script = Slow(language, ["The answer, which is long, is 3."])
    chat, body = chat_of(script), {"model": "m", "messages": ASKS, "stream": True}
    other = {**body, "max_tokens": 77}

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[int]:
        await break_off(client, body, script, "T")
        found = []
        while not is_under_way and len(chat.messages) < 3:
            await asyncio.sleep(0.01)
        for one in (body, other, body) if is_under_way else (other, body, body):
            assert said_in(await client.post("/chat/completions", json=one)) == "The answer, which is long, is 3."
            found.append(len(script.asked))
        return found

    assert served(chat, work) == ([1, 2, 3] if is_under_way else [2, 2, 3])


def test_equal_requests_that_time_out_are_each_taken_up_by_one_retry(language: Language) -> None:
    script = Held(language, ["one"])
    body = {"model": "m", "messages": ASKS}

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[str]:
        await asyncio.gather(*(gives_up(server, body) for _ in range(3)))
        again = [client.post("/chat/completions", json=body, headers={"x-stainless-retry-count": str(n)}) for n in (1, 0, 1)]
        asyncio.get_running_loop().call_later(0.3, script.is_let_go.set)
        return [said_in(answer) for answer in await asyncio.gather(*again)]

    assert served(chat_of(script), work) == ["one"] * 3
    assert len(script.asked) == 3


def test_a_text_whose_client_went_on_with_it_has_come_however_its_stream_ended(language: Language) -> None:
    script = Slow(language, ["one", "two"])
    chat, body = chat_of(script), {"model": "m", "messages": ASKS, "stream": True}

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[str]:
        await break_off(client, body, script, "e")
        while len(chat.messages) < 3:
            await asyncio.sleep(0.01)
        more = {**body, "messages": [*ASKS, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and?"}]}
        return [said_in(await client.post("/chat/completions", json=one)) for one in (more, body)]

    assert served(chat, work) == ["two", "one"]
    assert [one.begins for one in script.asked] == [True, False, True]


def test_an_engine_lets_those_who_listen_hear_its_text_while_it_generates(loop: EventLoop) -> None:
    heard: list[tuple[int, str]] = []
    gate = threading.Event()

    @agent
    async def listens(chat: Chat, row: Sample) -> float:
        chat.on_text = lambda context, text: (heard.append((context, text)), gate.set())  # type: ignore[assignment,return-value,func-returns-value]
        turn = await chat.say(str(row.prompt), max_tokens=6)
        chat.on_text = None
        before = len(heard)
        await chat.say("again", max_tokens=6)
        assert len(heard) == before
        return float(turn.text.startswith(heard[-1][1]) and heard[-1][0] == turn.num_context)

    episodes = host(loop)
    step = episodes._engine.step

    def slowly() -> Any:
        # Its second token waits until somebody has heard the first.
        if any(episodes._engine.progress().values()) and not gate.is_set():
            return []
        return step()

    episodes._engine.step = slowly  # type: ignore[method-assign]
    episodes.begin([begun(3, listens)])
    (made,) = played(episodes).values()
    assert made.columns["reward"] == 1.0
    assert heard


def test_log_probabilities_are_those_of_the_tokens_that_were_sampled_whole_and_in_a_stream(language: Language) -> None:
    script = Script(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[list[dict[str, Any]]]:
        whole = (await completed(client, ASKS, logprobs=True))["choices"][0]["logprobs"]["content"]
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 0, "stream": True}
        text = (await client.post("/chat/completions", json=body)).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        found = [one for chunk in chunks for choice in chunk["choices"] for one in (choice["logprobs"] or {}).get("content", ())]
        asked = {"input": "y", "include": ["message.output_text.logprobs"]}
        answer = (await client.post("/responses", json=asked)).json()
        assert (await completed(client, [{"role": "user", "content": "z"}]))["choices"][0]["logprobs"] is None
        return [whole, found, answer["output"][0]["content"][0]["logprobs"]]

    whole, streamed, responses = served(chat_of(script), work)
    assert whole == streamed == responses
    ids = [*language.encode_target("one"), min(language.eos_ids)]
    assert [one["token"] for one in whole] == [language.decode_all([token]) for token in ids]
    assert [one["logprob"] for one in whole] == [-0.5 * at for at in range(len(ids))]
    assert bytes(byte for one in whole for byte in one["bytes"]).decode().startswith("one")


def test_the_tokens_of_a_prompt_are_counted_without_a_turn(language: Language) -> None:
    script = Script(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> tuple[int, int]:
        body = {"model": "m", "system": "Be brief.", "messages": ASKS[1:], "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
        counted = await client.post("/messages/count_tokens", json=body)
        assert counted.status_code == 200, counted.text
        assert not script.asked
        said = await client.post("/messages", json={**body, "max_tokens": 50})
        return counted.json()["input_tokens"], said.json()["usage"]["input_tokens"]

    counted, had = served(chat_of(script), work)
    assert counted == had > 20


def called(call: object) -> list[object]:
    """Messages with a call of a tool."""
    return [*ASKS, {"role": "assistant", "content": None, "tool_calls": [call]}]


REFUSED: list[tuple[str, object, int, str]] = [
    ("/chat/completions", b"nonsense", 400, "Invalid JSON"),
    ("/chat/completions", {"messages": []}, 400, "messages"),
    ("/chat/completions", {"messages": ASKS, "n": 2}, 400, "n:"),
    ("/chat/completions", {"messages": ASKS, "logprobs": True, "top_logprobs": 2}, 400, "top_logprobs is not supported"),
    ("/chat/completions", {"messages": ASKS, "tool_choice": "required"}, 400, "tool_choice"),
    ("/chat/completions", {"messages": ASKS, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("/chat/completions", {"messages": ASKS, "tools": [{"type": "web_search"}]}, 400, "web_search"),
    ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    ("/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "robot"),
    ("/responses", {"input": "x", "previous_response_id": "r"}, 400, "previous_response_id"),
    ("/responses", {"input": [{"type": "computer_call"}]}, 400, "computer_call"),
    ("/messages", {"messages": ASKS[1:]}, 400, "max_tokens"),
    ("/chat/completions", {"messages": ASKS, "chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs"),
    ("/messages", {"max_tokens": 9, "messages": [*ASKS[1:], {"role": "assistant", "content": "It is"}]}, 400, "messages: the last one"),
    ("/nothing", {}, 404, ""),
    ("/chat/completions", {"messages": called(None)}, 400, "tool_calls: 0"),
    ("/chat/completions", {"messages": [*ASKS, {"role": "assistant", "tool_calls": "add"}]}, 400, "tool_calls"),
    ("/chat/completions", {"messages": called({"function": None})}, 400, "function: "),
    ("/chat/completions", {"messages": called({"function": {"arguments": "{}"}})}, 400, "the name null"),
    ("/chat/completions", {"messages": called({"function": {"name": "add", "arguments": "[1]"}})}, 400, "of 'add' are '[1]'"),
    ("/chat/completions", {"messages": called({"function": {"name": "add", "arguments": "a: 1"}})}, 400, "of 'add' are 'a: 1'"),
    ("/chat/completions", {"messages": called({"function": {"name": "add", "arguments": None}})}, 400, "of 'add' are None"),
    ("/chat/completions", {"messages": called({"function": {"name": "add", "arguments": '{"a":' * 50_000}})}, 400, "JSON object"),
    ("/chat/completions", {"messages": called({"function": {"name": "add", "arguments": '{"a": "\\ud800"}'}})}, 400, "JSON object"),
    ("/chat/completions", {"messages": called({"function": {"name": "add", "arguments": '{"a": NaN}'}})}, 400, "NaN"),
    ("/chat/completions", {"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]}, 400, "name"),
    ("/chat/completions", {"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}, 400, "function_call"),
    ("/chat/completions", {"messages": ASKS, "functions": [{"name": "add"}]}, 400, "functions is not supported"),
    ("/chat/completions", {"messages": ASKS, "tools": [{"type": "function", "function": None}]}, 400, "tools"),
    ("/chat/completions", {"messages": ASKS, "tools": [None]}, 400, "tools.0"),
    ("/chat/completions", {"messages": ASKS, "tools": [{"function": {"name": "add", "parameters": "int"}}]}, 400, "parameters of 'add'"),
    ("/chat/completions", {"messages": ASKS, "tools": [ADD, ADD]}, 400, "two have the name 'add'"),
    ("/chat/completions", {"messages": ASKS, "stop": ""}, 400, "stop"),
    ("/chat/completions", {"messages": ASKS, "stop": ["END", "\ufffd"]}, 400, "stop"),
    ("/responses", {"input": []}, 400, "input"),
    ("/responses", {"input": [{"type": "reasoning"}], "instructions": "Be brief."}, 400, "input"),
    ("/responses", {"input": "x", "text": {"format": "json"}}, 400, "text.format"),
    ("/responses", {"input": "x", "prompt": {"id": "p"}}, 400, "prompt is not supported"),
    ("/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}, 400, "text.format"),
    (
        "/chat/completions",
        {"messages": ASKS, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        400,
        "response_format",
    ),
    ("/messages/count_tokens", {"messages": []}, 400, "messages"),
    ("/chat/completions", {"messages": ASKS, "max_tokens": 10**30}, 400, "max_tokens"),
    ("/chat/completions", {"messages": ASKS, "max_completion_tokens": 2**31}, 400, "max_completion_tokens"),
    ("/responses", {"input": "x", "max_output_tokens": 2**31}, 400, "max_output_tokens"),
    ("/messages", {"max_tokens": 2**31, "messages": ASKS[1:]}, 400, "max_tokens"),
    ("/responses", {"input": "x", "tools": [{"type": "custom", "name": "code"}]}, 400, "custom"),
    ("/responses", {"input": [{"type": "function_call", "arguments": "{}"}]}, 400, "the name null"),
    ("/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": ["x"]}]}, 400, "content"),
    ("/messages", {"max_tokens": 9, "messages": ASKS[1:], "stop_sequences": [""]}, 400, "stop"),
    (
        "/messages",
        {"max_tokens": 9, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "add", "input": None}]}]},
        400,
        "of 'add' are None",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED, ids=[f"{at}{one[0]}-{one[3]}" for at, one in enumerate(REFUSED)])
def test_what_can_t_be_is_refused_by_name_and_harms_no_episode(
    path: str, body: object, status: int, words: str, language: Language
) -> None:
    script = Script(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))  # type: ignore[arg-type]
        assert answer.status_code == status
        assert words in answer.text
        assert not script.asked
        assert (await completed(client, ASKS))["choices"][0]["message"]["content"] == "one"

    served(chat_of(script), work)


def test_nobody_gets_in_without_the_key_or_by_another_name_or_when_the_episode_is_over(language: Language) -> None:
    async def run() -> None:
        chat = chat_of(Script(language, ["one"]))
        async with endpoint(chat) as server, httpx.AsyncClient(timeout=60) as client:
            other = server.base_url.replace(server.api_key, "0" * 32)
            assert (await client.post(f"{other}/chat/completions", json={"messages": ASKS})).status_code == 404
            evil = {"host": "evil.example"}
            assert (await client.post(f"{server.base_url}/chat/completions", json={"messages": ASKS}, headers=evil)).status_code == 403
            assert (await client.get(f"{server.base_url}/models")).json()["data"][0]["id"] == "policy"
            other_api = await client.post(f"{server.base_url}/completions", json={"prompt": "a"})
            assert other_api.status_code == 404
            assert "POST /v1/completions is not supported" in other_api.json()["error"]["message"]
            assert server.api_key not in other_api.text
            async with endpoint(chat_of(Script(language, ["two"]))) as second:
                assert second.base_url.split("/")[2] == server.base_url.split("/")[2]  # One server.
            gone = await client.post(f"{second.base_url}/chat/completions", json={"messages": ASKS})
            assert gone.status_code == 404
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{server.base_url}/models")
        assert not _Server._running

    asyncio.run(run())


KEYED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": ASKS}),
    ("responses", {"input": "x"}),
    ("messages", {"messages": ASKS[1:], "max_tokens": 50}),
    ("messages/count_tokens", {"messages": ASKS[1:]}),
]


@pytest.mark.parametrize(("path", "body"), KEYED, ids=[path for path, _ in KEYED])
def test_at_the_common_address_the_key_in_a_header_says_which_episode_is_meant(path: str, body: dict[str, Any], language: Language) -> None:
    scripts = [Script(language, [name]) for name in ("one", "two")]

    async def run() -> None:
        async with (
            endpoint(chat_of(scripts[0])) as first,
            endpoint(chat_of(scripts[1])) as second,
            httpx.AsyncClient(base_url=first.common_url, timeout=60) as client,
        ):
            assert first.common_url == second.common_url

            async def status(**headers: str) -> int:
                headers = {name.replace("_", "-"): value for name, value in headers.items()}
                answer, models = await client.post(path, json=body, headers=headers), await client.get("models", headers=headers)
                assert answer.status_code == models.status_code
                if answer.status_code != 200:
                    told.add(answer.text)
                return answer.status_code

            told, key = set[str](), second.api_key
            for wrong in ("0", "0" * 32, key[:-1], key + "0", f"{key} {key}", "/", first.api_key[:16] + key[16:]):
                assert await status(authorization=f"Bearer {wrong}") == 401
                assert await status(x_api_key=wrong) == 401
            assert await status() == await status(authorization=key) == await status(authorization=f"Basic {key}") == 401
            assert await status(authorization=f"Bearer {key}", host="evil.example") == 403
            assert len(told) == 2, "a wrong key and none are refused alike"
            assert not scripts[0].asked
            assert not scripts[1].asked
            for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"x_api_key": key}):
                assert await status(**headers) == 200
            assert await status(authorization=f"Bearer {key}", x_api_key="none") == 200
            assert not scripts[0].asked
            assert len(scripts[1].asked) == (0 if path.endswith("count_tokens") else 4)

    asyncio.run(run())


def test_a_key_in_a_header_is_refused_once_its_episode_is_over(language: Language) -> None:
    async def run() -> None:
        async with endpoint(chat_of(Script(language, ["one"]))) as server, httpx.AsyncClient(base_url=server.common_url) as client:
            async with endpoint(chat_of(Script(language, ["two"]))) as second:
                headers = {"authorization": f"Bearer {second.api_key}"}
                assert (await client.post("chat/completions", json={"messages": ASKS}, headers=headers)).status_code == 200
            assert (await client.post("chat/completions", json={"messages": ASKS}, headers=headers)).status_code == 401

    asyncio.run(run())


def test_a_failure_of_the_episode_is_an_error_to_the_client_and_raised_again_whatever_the_agent_makes_of_it(language: Language) -> None:
    script = Script(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        said = (await completed(client, ASKS))["choices"][0]["message"]
        answer = await client.post("/chat/completions", json={"messages": [*ASKS, said, {"role": "user", "content": "and?"}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_turns")

    with pytest.raises(EpisodeFailed, match="has had its 1 turns"):
        served(chat_of(script, max_turns=1), work)


def test_limits_and_stop_texts_of_a_request_hold(language: Language) -> None:
    script = Script(language, ["a long answer"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> dict[str, Any]:
        return await completed(client, ASKS, max_completion_tokens=4, stop=["END"])

    answer = served(chat_of(script), work)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    assert (script.asked[0].max_new_tokens, script.asked[0].stop) == (4, ("END",))


def test_fields_that_are_null_are_as_if_they_were_not_there(language: Language) -> None:
    names = ("n", "stream", "stop", "tools", "tool_choice", "max_tokens", "stream_options", "response_format", "logit_bias", "logprobs")

    async def work(server: Endpoint, client: httpx.AsyncClient) -> dict[str, Any]:
        return await completed(client, ASKS, **dict.fromkeys(names))

    assert served(chat_of(Script(language, ["one"])), work)["choices"][0]["message"]["content"] == "one"


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"'])
def test_a_call_that_no_json_can_say_is_a_text_and_the_conversation_goes_on(value: str, language: Language) -> None:
    script = Script(language, [CALL.replace("1", value), "3"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> dict[str, Any]:
        shown = {"name": "add", "input_schema": {"type": "object"}}
        body: dict[str, Any] = {"max_tokens": 900, "tools": [shown], "messages": [ASKS[1]]}
        first = await client.post("/messages", json=body)
        assert first.status_code == 200, first.text
        said = {"role": "assistant", "content": first.json()["content"]}
        again = {**body, "messages": [ASKS[1], said, {"role": "user", "content": "What?"}]}
        assert (await client.post("/messages", json=again)).status_code == 200
        return first.json()  # type: ignore[no-any-return]

    first = served(chat_of(script), work)
    assert [part["type"] for part in first["content"]] == ["text"]
    assert value in first["content"][0]["text"]
    assert [one.name for one in script.asked] == ["main", "main"]


def test_names_of_conversations_follow_from_all_that_is_asked(language: Language) -> None:
    found = []
    for order in ((4, 9, 6), (6, 4, 9)):
        script = Script(language, ["a long answer"], delay_s=0.05)

        async def work(server: Endpoint, client: httpx.AsyncClient, order: tuple[int, ...] = order) -> None:
            await completed(client, ASKS)
            for limit in order:
                client_s = asyncio.ensure_future(completed(client, ASKS[1:], max_tokens=limit))
                await asyncio.sleep(0.01)
            await client_s

        served(chat_of(script), work)
        found.append({one.name: one.max_new_tokens for one in script.asked})
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_a_request_that_shows_other_tools_begins_another_conversation_whose_model_sees_them(language: Language) -> None:
    script = Script(language, ["one"])
    other = {"type": "function", "function": {"name": "multiply"}}

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        said = (await completed(client, ASKS, tools=[ADD]))["choices"][0]["message"]
        more = [*ASKS, said, {"role": "user", "content": "and?"}]
        await completed(client, more, tools=[ADD, other])
        await completed(client, more, tools=[ADD])

    served(chat_of(script), work)
    first, second, third = script.asked
    assert (first.name, third.name) == ("main", "main")
    assert second.name.startswith("http-")
    assert "Tools: add multiply" in (second.prompt_text or "")


def test_without_a_choice_of_tools_they_are_shown_and_a_call_is_a_text(language: Language) -> None:
    script = Script(language, [CALL])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[dict[str, Any]]:
        first = (await completed(client, ASKS, tools=[ADD]))["choices"][0]["message"]
        more = [*ASKS, first, {"role": "tool", "content": "3", "tool_call_id": first["tool_calls"][0]["id"]}]
        return [first, (await completed(client, more, tools=[ADD], tool_choice="none"))["choices"][0]["message"]]

    first, second = served(chat_of(script), work)
    assert first["tool_calls"]
    assert not second.get("tool_calls")
    assert second["content"] == CALL
    assert [one.name for one in script.asked] == ["main", "main"]


PARALLEL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/chat/completions", {"messages": ASKS, "tools": [ADD]}, {"parallel_tool_calls": False}),
    ("/responses", {"input": "x", "tools": [{"type": "function", **ADD["function"]}]}, {"parallel_tool_calls": False}),  # type: ignore[dict-item]
    (
        "/messages",
        {"max_tokens": 900, "messages": ASKS[1:], "tools": [{"name": "add"}]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
]


@pytest.mark.parametrize(("path", "body", "one"), PARALLEL, ids=[path for path, _, _ in PARALLEL])
def test_a_turn_with_several_calls_is_a_text_to_a_client_that_takes_one_at_a_time(
    path: str, body: dict[str, Any], one: dict[str, Any], language: Language
) -> None:
    async def said(script: Script, asked: dict[str, Any]) -> str:
        async with endpoint(chat_of(script)) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            answer = await client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            return answer.text

    several, single = f"{CALL}\n{CALL}", Script(language, [CALL])
    kinds = ('"tool_calls":', '"type":"function_call"', '"type":"tool_use"')
    found = [asyncio.run(said(Script(language, [several]), body)), asyncio.run(said(single, body | one))]
    assert all(any(kind in text for kind in kinds) for text in found)
    text = asyncio.run(said(Script(language, [several]), body | one))
    assert not any(kind in text for kind in kinds)
    assert text.count("<tool_call>") == 2


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Language:
    """One whose template takes no message of a tool, and none of the system after the first."""
    template = (
        "{% if tools %}Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}\n{# <tool_call> #}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' or (m.role == 'system' and not loop.first) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    folder = tmp_path_factory.mktemp("strict")
    tokenizer = byte_tokenizer(folder, special=("<|im_end|>", "<|im_start|>"), chat_template=template)
    return TextCodec(tokenizer, frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")]), chat=True, template=ChatTemplate())


def test_messages_that_the_template_refuses_are_a_bad_request_and_the_conversation_is_as_it_was(strict: Language) -> None:
    script = Script(strict, ["one"])
    chat = chat_of(script, max_conversations=1)
    late = {"role": "system", "content": "And be kind."}
    other = {"type": "function", "function": {"name": "multiply"}}

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        async def refused(messages: Sequence[object], **more: object) -> None:
            answer = await client.post("/chat/completions", json={"messages": messages, **more})
            assert answer.status_code == 400
            assert "Conversation roles must alternate" in answer.json()["error"]["message"]

        await refused([*ASKS, late, ASKS[1]], tools=[other])
        await refused([*ASKS, late, ASKS[1]], tools=[other])
        assert not chat._table.begun
        first = (await completed(client, ASKS, tools=[ADD]))["choices"][0]["message"]
        await refused([*ASKS, first, late, {"role": "user", "content": "and?"}], tools=[ADD])
        await completed(client, [*ASKS, first, {"role": "user", "content": "and?"}], tools=[ADD])

    served(chat, work)
    assert [(one.name, one.begins) for one in script.asked] == [("main", True), ("main", False)]
    assert (script.asked[0].prompt_text or "").startswith("Tools: add<|im_start|>")
    assert chat._table.begun == {"main"}


def test_an_agents_own_messages_that_the_template_refuses_fail_its_episode(strict: Language) -> None:
    with pytest.raises(EpisodeFailed, match="Conversation roles must alternate") as refused:
        asyncio.run(chat_of(Script(strict, ["one"])).say([{"role": "user", "content": "x"}, {"role": "tool", "content": "3"}]))
    assert refused.value.how == "invalid"


def test_of_conversations_that_begin_at_once_none_is_the_chat_and_their_names_do_not_go_by_their_arrival(language: Language) -> None:
    found = []
    for order in ((1, 2, 3), (3, 1, 2)):
        script = Script(language, ["yes"], delay_s=0.05)

        async def run(script: Script = script, order: tuple[int, ...] = order) -> None:
            async with (
                endpoint(chat_of(script), at_once=True) as server,
                httpx.AsyncClient(base_url=server.base_url, timeout=60) as client,
            ):
                asking = []
                for number in order:
                    asking.append(asyncio.ensure_future(completed(client, [{"role": "user", "content": f"{number}?"}])))
                    while len(script.asked) < len(asking):
                        await asyncio.sleep(0.001)
                said = (await asking[order.index(1)])["choices"][0]["message"]
                await completed(client, [{"role": "user", "content": "1?"}, said, {"role": "user", "content": "and?"}])
                await asyncio.gather(*asking)

        asyncio.run(run())
        found.append({one.name: (list(one.ids), one.begins) for one in script.asked})
        assert len(script.asked) == 4
    assert found[0] == found[1]
    assert len(found[0]) == 3
    assert "main" not in found[0]


def test_what_did_not_fit_is_not_left_out_of_what_follows_in_silence(language: Language) -> None:
    script = Script(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> list[str]:
        messages, ends = list[object](ASKS), []
        for text in ("long " * 100, "short"):
            answer = (await completed(client, messages))["choices"][0]
            messages += [answer["message"], {"role": "user", "content": text}]
            ends.append(answer["finish_reason"])
        return [*ends, (await completed(client, messages))["choices"][0]["finish_reason"]]

    assert served(chat_of(script, max_tokens=200), work) == ["stop", "length", "length"]
    assert len(script.asked) == 1


def test_a_chat_may_be_served_again_and_be_asked_the_same(language: Language) -> None:
    script = Script(language, ["one"])

    async def run() -> None:
        chat = chat_of(script)
        for _ in range(3):
            async with endpoint(chat) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
                await completed(client, ASKS)
        await chat.say("and?")
        async with endpoint(chat) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            said = (await completed(client, [{"role": "user", "content": "new"}]))["choices"][0]["message"]
            assert said["content"] == "one"

    asyncio.run(run())
    assert len({one.name for one in script.asked}) == 4


def test_what_the_agent_says_itself_is_in_no_history_of_a_client(language: Language) -> None:
    script = Script(language, ["one"])

    async def run() -> None:
        chat = chat_of(script)
        async with endpoint(chat) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            said = (await completed(client, ASKS))["choices"][0]["message"]
            await chat.say("a hint")
            await completed(client, [*ASKS, said, {"role": "user", "content": "and?"}])

    asyncio.run(run())
    assert [one.name == "main" for one in script.asked] == [True, True, False]


def test_a_result_has_the_name_of_its_tool_in_a_history_that_begins_a_conversation(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    tokenizer = byte_tokenizer(tmp_path, special=("<|im_end|>", "<|im_start|>"), chat_template=template)
    language = TextCodec(tokenizer, frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")]), chat=True, template=ChatTemplate())
    script = Script(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        await completed(client, [*called(call), {"role": "tool", "content": "3", "tool_call_id": "c"}])

    served(chat_of(script), work)
    assert "tool add\n3" in (script.asked[0].prompt_text or "")


# ---- the end of an episode


def test_after_a_failure_the_model_is_asked_nothing_more(language: Language) -> None:
    class Failing(Script):
        async def turn(self, asked: Asked) -> Reply:
            await super().turn(asked)
            raise EpisodeFailed("turn_timed_out", "too slow")

    script = Failing(language, ["one"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            answer = await client.post("/chat/completions", json={"messages": ASKS})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "turn_timed_out")

    with pytest.raises(EpisodeFailed, match="too slow"):
        served(chat_of(script), work)
    assert len(script.asked) == 1


def test_a_request_whose_body_comes_after_the_end_takes_no_turn(language: Language) -> None:
    script = Script(language, ["one"])

    async def run() -> bytes:
        async with endpoint(chat_of(Script(language, ["two"]))):  # It keeps the server.
            async with endpoint(chat_of(script)) as server:
                port, body = int(server.base_url.split(":")[2].split("/")[0]), json.dumps({"messages": ASKS}).encode()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /{server.api_key}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body[:5])
                await asyncio.sleep(0.2)
            writer.write(body[5:])
            status = await reader.readline()
            writer.close()
            return status

    assert b"404" in asyncio.run(run())
    assert not script.asked


NEVER_S = 60.0


@pytest.mark.parametrize("num_turns", [0, 1])
def test_an_episode_whose_client_never_comes_or_is_gone_after_a_turn_has_timed_out(num_turns: int, language: Language) -> None:
    script, ended = Script(language, ["one"]), list[str]()

    async def run() -> None:
        async with endpoint(chat_of(script), idle_s=0.5) as server:
            async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
                for _ in range(num_turns):
                    await completed(client, ASKS)
            try:
                await asyncio.sleep(NEVER_S)
            finally:
                ended.append("the agent's wait")

    with pytest.raises(EpisodeFailed, match=r"for 0.5 s: it never came, or is gone; .*idle_s") as caught:
        asyncio.run(run())
    assert (caught.value.how, ended, len(script.asked)) == ("timed_out", ["the agent's wait"], num_turns)


def test_an_agent_that_catches_the_end_of_its_wait_has_timed_out_and_the_model_is_asked_nothing_more(language: Language) -> None:
    script = Script(language, ["one"])

    async def run() -> int:
        async with endpoint(chat_of(script), idle_s=0.1) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(NEVER_S)
            answer = await client.post("/chat/completions", json={"messages": ASKS})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "timed_out")
        return 1

    with pytest.raises(EpisodeFailed, match="no client has asked"):
        asyncio.run(run())
    assert script.asked == []


def test_a_client_that_is_slow_between_its_requests_and_a_turn_that_is_are_not_gone(language: Language) -> None:
    script = Held(language, ["one"])

    async def run() -> None:
        async with endpoint(chat_of(script), idle_s=1.5) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            asyncio.get_running_loop().call_later(3.0, script.is_let_go.set)
            messages: list[dict[str, Any]] = list(ASKS)
            for _ in range(6):
                said = (await completed(client, messages))["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "and?"}]
                await asyncio.sleep(0.4)

    asyncio.run(run())
    assert len(script.asked) == 6


def test_what_the_agent_does_itself_is_no_silence_and_none_is_no_limit(language: Language) -> None:
    async def idle(idle_s: float | None, delay_s: float) -> None:
        chat = chat_of(Script(language, ["one"], delay_s=delay_s))
        async with endpoint(chat, idle_s=idle_s):
            await (chat.say("?") if delay_s else asyncio.sleep(0.2))

    asyncio.run(idle(0.1, 0.4))
    asyncio.run(idle(None, 0.0))
    with pytest.raises(OptionError, match="idle_s is 0"):
        asyncio.run(idle(0, 0.0))


@pytest.mark.parametrize("is_failed", [False, True])
def test_no_turn_outlives_the_endpoint_not_of_equal_requests_either(is_failed: bool, language: Language) -> None:
    ended = []

    class Slow(Script):
        async def turn(self, asked: Asked) -> Reply:
            reply = await super().turn(asked)
            ended.append(asked.name)
            return reply

    script = Slow(language, ["one"], delay_s=60 if is_failed else 1)

    async def run() -> int:
        async with httpx.AsyncClient(timeout=60) as client:
            with contextlib.suppress(KeyError):
                async with endpoint(chat_of(script)) as server:
                    url = f"{server.base_url}/chat/completions"
                    waiting = [asyncio.ensure_future(client.post(url, json={"messages": ASKS})) for _ in range(3)]
                    while len(script.asked) < 3:
                        await asyncio.sleep(0.01)
                    if is_failed:
                        raise KeyError
            assert len(ended) == (0 if is_failed else 3)
            answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [404 if is_failed else 200] * 3
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(run()) == 0


def test_a_client_that_reads_nothing_holds_neither_the_end_nor_a_socket(language: Language) -> None:
    class Long(Script):
        async def turn(self, asked: Asked) -> Reply:
            return (await super().turn(asked))._replace(text="x" * 40_000_000)

    script = Long(language, ["x"])

    async def run() -> None:
        async with endpoint(chat_of(script)) as server:
            port, body = int(server.base_url.split(":")[2].split("/")[0]), json.dumps({"messages": ASKS, "stream": True}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            head = f"POST /{server.api_key}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            while not script.asked:
                await asyncio.sleep(0.01)
            (running,) = _Server._running.values()
            (connection,) = running._server.server_state.connections
            await asyncio.sleep(0.5)
        await asyncio.sleep(0)
        assert connection.transport.get_extra_info("socket").fileno() == -1
        writer.close()

    asyncio.run(run())


def test_a_loop_that_is_closed_leaves_no_open_port(language: Language) -> None:
    loop, found = EventLoop(), Future[int]()

    async def run() -> None:
        async with endpoint(chat_of(Script(language, ["one"]))) as server:
            await asyncio.sleep(0.3)
            found.set_result(int(server.base_url.split(":")[2].split("/")[0]))
            await asyncio.sleep(60)

    tasks = list[asyncio.Task[None]]()
    loop.call(lambda: tasks.append(asyncio.ensure_future(run())))
    port = found.result(20)
    loop.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


# ---- an address that episodes share


def test_conversations_of_several_episodes_at_one_address_are_told_apart_by_a_header(language: Language) -> None:
    scripts = {name: Script(language, [name]) for name in ("one", "two", "three")}

    async def run() -> list[str]:
        async with shared_endpoint() as address, httpx.AsyncClient(base_url=address.base_url, timeout=60) as client:

            async def asks(name: str) -> str:
                answer = await client.post("/chat/completions", json={"messages": ASKS}, headers={"x-session-id": name})
                return str(answer.json()["choices"][0]["message"]["content"]) if answer.status_code == 200 else answer.text

            async with address.episode() as serve, address.episode() as other:
                serve("a", chat_of(scripts["one"]))
                serve("b", chat_of(scripts["two"]))
                other("c", chat_of(scripts["three"]))
                said = [*await asyncio.gather(*(asks(name) for name in "abcd")), await asks("")]
                assert (await client.get("/models")).status_code == 200
                async with endpoint(chat_of(Script(language, ["own"]))) as server:
                    assert server.base_url.split("/")[2] == address.base_url.split("/")[2]
            return [*said, await asks("a")]

    *said, unknown, unnamed, over = asyncio.run(run())
    assert said == ["one", "two", "three"]
    assert all("there is no such episode, or it is over" in text for text in (unknown, unnamed, over))
    assert not _Server._running


def test_a_failure_in_one_of_an_episodes_conversations_is_raised_where_it_ends_and_harms_no_other_episode(language: Language) -> None:
    class Failing(Script):
        async def turn(self, asked: Asked) -> Reply:
            raise EpisodeFailed("turn_timed_out", "too slow")

    slow, well = Script(language, ["one"], delay_s=60), Script(language, ["one"])

    async def run() -> str:
        async with shared_endpoint() as address, httpx.AsyncClient(base_url=address.base_url, timeout=60) as client:

            async def asks(name: str) -> httpx.Response:
                return await client.post("/chat/completions", json={"messages": ASKS}, headers={"x-session-id": name})

            async def fails() -> None:
                async with address.episode() as serve:
                    serve("a", chat_of(Failing(language, [])))
                    serve("b", chat_of(slow))
                    assert (await asks("a")).status_code == 400
                    waiting.append(asyncio.ensure_future(asks("b")))
                    while not slow.asked:
                        await asyncio.sleep(0.01)
                    raise KeyError

            waiting: list[asyncio.Future[httpx.Response]] = []
            async with address.episode() as other:
                other("c", chat_of(well))
                with pytest.raises(EpisodeFailed, match="too slow"):
                    await fails()
                assert (await waiting[0]).status_code == 404
                return str((await asks("c")).json()["choices"][0]["message"]["content"])

    assert asyncio.run(run()) == "one"
    assert not _Server._running


# ---- clients as they are installed


def test_the_client_of_openai_speaks_with_it_in_both_dialects(language: Language) -> None:
    openai = pytest.importorskip("openai", reason=NO_CLIENT.format("openai"))
    script = Script(language, [CALL, "3"])

    async def work(server: Endpoint, _: httpx.AsyncClient) -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            first = await client.chat.completions.create(model="policy", messages=ASKS, tools=[ADD])
            said = first.choices[0].message
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}
            second = await client.chat.completions.create(model="policy", messages=[*ASKS, said, result], tools=[ADD])
            asked: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
            flat = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]
            third = await client.responses.create(model="policy", instructions="Be brief.", input=asked, tools=[flat])
            (call,) = third.output
            asked += [*third.output, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
            fourth = await client.responses.create(model="policy", instructions="Be brief.", input=asked, tools=[flat])
            text = ""
            async with client.responses.stream(model="policy", input="Say it in a stream.", tools=[flat]) as stream:
                async for event in stream:
                    text += event.delta if event.type == "response.function_call_arguments.delta" else ""
            return second.choices[0].message.content, fourth.output_text, text

    second, fourth, streamed = served(chat_of(script), work)
    assert (second, fourth) == ("3", "3")
    assert json.loads(streamed) == {"a": 1, "b": 2}
    assert [one.begins for one in script.asked] == [True, False, True, False, True]


def test_clients_of_openai_and_anthropic_reach_an_episode_by_their_key_alone(language: Language) -> None:
    openai = pytest.importorskip("openai", reason=NO_CLIENT.format("openai"))
    anthropic = pytest.importorskip("anthropic", reason=NO_CLIENT.format("anthropic"))
    script, other = Script(language, ["one"]), Script(language, ["two"])

    async def run() -> list[str]:
        async with endpoint(chat_of(other)) as second, endpoint(chat_of(script)) as server:
            url, key = server.common_url, server.api_key
            found = []
            async with openai.AsyncOpenAI(base_url=url, api_key=second.api_key) as client:  # One client, for any episode.
                mine = client.with_options(api_key=key)
                found.append((await mine.chat.completions.create(model="policy", messages=ASKS)).choices[0].message.content)
                found.append((await mine.responses.create(model="policy", input="x")).output_text)
                found.append((await client.responses.create(model="policy", input="x")).output_text)
                with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
                    await client.with_options(api_key="none").responses.create(model="policy", input="x")
            asked: dict[str, Any] = {"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
            for how in ({"api_key": key}, {"auth_token": key}):
                async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), **how) as client:
                    found.append((await client.messages.create(**asked)).content[-1].text)
                    async with client.messages.stream(**asked) as stream:
                        found.append(await stream.get_final_text())
            async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none") as client:
                with pytest.raises(anthropic.AuthenticationError, match="missing or wrong"):
                    await client.messages.create(**asked)
            return found

    assert asyncio.run(run()) == ["one", "one", "two", *["one"] * 4]


def test_a_client_of_openai_that_times_out_asks_again_and_takes_one_turn(language: Language) -> None:
    openai = pytest.importorskip("openai", reason=NO_CLIENT.format("openai"))
    script = Script(language, ["one"], delay_s=0.8)

    async def work(server: Endpoint, _: httpx.AsyncClient) -> str:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, timeout=0.3, max_retries=20) as client:
            return str((await client.chat.completions.create(model="policy", messages=ASKS)).choices[0].message.content)

    assert served(chat_of(script), work) == "one"
    assert len(script.asked) == 1


async def anthropic_turns(client: httpx.AsyncClient) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two turns as Anthropic's client would ask for them."""
    shown = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]
    body: dict[str, Any] = {"model": "m", "max_tokens": 100, "system": "Be brief.", "tools": [shown]}
    question = {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}
    first = (await client.post("/messages", json={**body, "messages": [question]})).json()
    (use,) = [part for part in first["content"] if part["type"] == "tool_use"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}]}
    messages = [question, {"role": "assistant", "content": first["content"]}, result]
    return first, (await client.post("/messages", json={**body, "messages": messages})).json()


def test_anthropics_messages_are_the_turns_that_openais_are(language: Language) -> None:
    script, other = Script(language, [CALL, "3"]), Script(language, [CALL, "3"])

    async def work(server: Endpoint, client: httpx.AsyncClient) -> tuple[dict[str, Any], dict[str, Any]]:
        return await anthropic_turns(client)

    async def by_openai(server: Endpoint, client: httpx.AsyncClient) -> None:
        said = (await completed(client, ASKS, tools=[ADD]))["choices"][0]["message"]
        result = {"role": "tool", "content": "3", "tool_call_id": said["tool_calls"][0]["id"]}
        await completed(client, [*ASKS, said, result], tools=[ADD])

    first, second = served(chat_of(script), work)
    assert (first["stop_reason"], second["stop_reason"]) == ("tool_use", "end_turn")
    assert second["content"] == [{"type": "text", "text": "3"}]
    served(chat_of(other), by_openai)
    assert [(one.name, list(one.ids)) for one in script.asked] == [(one.name, list(one.ids)) for one in other.asked]


def test_the_client_of_anthropic_speaks_with_it(language: Language) -> None:
    anthropic = pytest.importorskip("anthropic", reason=NO_CLIENT.format("anthropic"))
    script = Script(language, [CALL, "3"])

    async def work(server: Endpoint, _: httpx.AsyncClient) -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.anthropic_url, api_key=server.api_key) as client:
            whole = await client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "1 + 2?"}])
            async with client.messages.stream(model="m", max_tokens=50, messages=[{"role": "user", "content": "again?"}]) as stream:
                final = await stream.get_final_message()
            counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "1 + 2?"}])
            assert counted.input_tokens == whole.usage.input_tokens
            return whole.content[-1].text, final.content[-1].text

    assert served(chat_of(script), work) == (CALL, CALL)  # Without tools a call is a text.


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat completions"])
def test_an_agent_of_openai_agents_runs_its_tools_in_turns_of_the_episode(api: str, is_streamed: bool, language: Language) -> None:
    openai = pytest.importorskip("openai", reason=NO_CLIENT.format("openai"))
    pytest.importorskip("agents.run", reason=NO_CLIENT.format("openai-agents"))  # Without it this folder is a package `agents`.
    agents = importlib.import_module("agents")
    script, sums = Script(language, [CALL, "3"]), []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        sums.append(a + b)
        return str(a + b)

    async def work(server: Endpoint, _: httpx.AsyncClient) -> str:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            kind = {"responses": agents.OpenAIResponsesModel, "chat completions": agents.OpenAIChatCompletionsModel}[api]
            theirs = agents.Agent(name="adder", instructions="Be brief.", tools=[add], model=kind(model="m", openai_client=client))
            how = agents.RunConfig(tracing_disabled=True)
            if not is_streamed:
                return str((await agents.Runner.run(theirs, "1 + 2?", run_config=how)).final_output)
            run = agents.Runner.run_streamed(theirs, "1 + 2?", run_config=how)
            async for _ in run.stream_events():
                pass
            return str(run.final_output)

    assert served(chat_of(script), work) == "3"
    assert sums == [3]
    assert [(one.name, one.begins) for one in script.asked] == [("main", True), ("main", False)]


# ---- episodes


def speaker(path: str = "/chat/completions") -> Callable[..., Any]:
    """An agent that knows nothing of m2flow but an address: two turns, and a side question at the same time."""

    async def elsewhere(base_url: str, question: str) -> float:
        async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
            messages: list[dict[str, object]] = [{"role": "user", "content": question}]
            first = (await client.post(path, json={"messages": messages, "max_tokens": 9})).json()["choices"][0]["message"]
            more = [*messages, first, {"role": "user", "content": " and?"}]
            side = [{"role": "user", "content": f"{question} aside"}]
            answers = await asyncio.gather(*(client.post(path, json={"messages": one, "max_tokens": 9}) for one in (more, side)))
            return float(sum(len(one.json()["choices"][0]["message"]["content"]) for one in answers) % 5)

    @agent
    async def speaks(chat: Chat, row: Sample) -> float:
        async with endpoint(chat) as server:
            return await elsewhere(server.base_url, str(row.prompt))

    return speaks


def test_an_episode_by_http_that_was_stopped_goes_on_to_the_same_tokens(loop: EventLoop) -> None:
    bounds = Bounds(8, max_conversations=4)
    expected = whole(loop, 3, speaker(), bounds)
    again = whole(loop, 3, speaker(), bounds)
    assert expected.ragged("tokens").values.tolist() == again.ragged("tokens").values.tolist()
    for num_steps in (1, 3, 5, 8):
        episodes = host(loop)
        start = start_of(3, speaker())
        episodes.begin([EpisodeStart(start.request, start.agent, start.row, bounds)])
        for _ in range(num_steps):
            episodes.step()
        stopped = {made.id: made for made in episodes.abort([start.request.id])}
        if not stopped:
            continue
        episodes = host(loop)
        transcript = stopped_row(stopped[start.request.id])
        episodes.begin([EpisodeStart(start.request, start.agent, start.row, bounds, transcript)])
        (made,) = played(episodes).values()
        assert not made.columns["failure"]
        assert row_of(made).ragged("tokens").values.tolist() == expected.ragged("tokens").values.tolist()


def test_an_episode_without_a_client_ends_as_one_that_has_timed_out(loop: EventLoop) -> None:
    @agent
    async def waits(chat: Chat, row: Sample) -> float:
        async with endpoint(chat, idle_s=0.2):
            await asyncio.Event().wait()
        return 1.0

    episodes = host(loop)
    start = start_of(3, waits)
    episodes.begin([EpisodeStart(start.request, start.agent, start.row, Bounds(8))])
    (made,) = played(episodes).values()
    assert made.columns["failure"] == "timed_out"
    assert "no client has asked" in made.columns["episode"]["error"]


def test_two_agents_by_http_have_rewards_of_their_own_with_what_their_clients_began_beside(loop: EventLoop) -> None:
    async def asks(chat: Chat) -> None:
        async with endpoint(chat) as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            for text in ("one?", "aside?"):
                await completed(client, [{"role": "user", "content": text}], max_tokens=4)

    @agent
    async def game(chat: Chat, row: Sample) -> dict[str, float]:
        await asyncio.gather(asks(chat.conversation("black")), asks(chat.conversation("white")))
        return {"black": 1.0, "white": -1.0}

    row = whole(loop, 3, game, Bounds(8, max_conversations=4))
    record: Any = row.ragged("episode").item(0)
    assert sorted(record["rewarded"].values()) == ["black", "black", "white", "white"]


@flow
def talks() -> None:
    policy = Policy("fake")
    rows = Dataset([{"prompt": f"{n} plus {n}?"} for n in range(4)], name="rows", shuffle=False)
    for _ in steps(2):
        episodes = policy.rollout(speaker(), rows.take(2), n=2, max_tokens=80, max_turns=4, max_conversations=3)
        policy.update(episodes, episodes.reward, optimizer=AdamW(0.1))


@pytest.mark.usefixtures("quick")
def test_a_planned_run_of_agents_by_http_equals_the_eager_one() -> None:
    assert run_planned(talks, {}, SPEC, seed=3) == run_eager(talks, {}, SPEC, seed=3)
