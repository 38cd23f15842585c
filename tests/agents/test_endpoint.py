"""The server of chat completions: answers are the engine's, clients may do as they like, and what can't be done is refused by name."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import programs
import pytest
import torch
import transformers
import uvicorn
from click.testing import CliRunner
from tiny_models import byte_tokenizer, save_config

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.agents.endpoint import Asked, ChatServer, Generator, _Running
from m2flow.cli.main import cli
from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.recipe import AdamW, Model, Sampling
from m2flow.runner.run import Run
from m2flow.samples import Finish
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec

TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>tool {{ t.function.name }}<|im_end|>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}]
KEY = "a key that nobody can guess"
LONG = {"model": "tiny", "messages": HELLO, "n": 64, "max_tokens": 200, "logit_bias": {"0": -100}}
NO_CLIENT = "the package {} is not installed; the extra serve-tests has it"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer(folder, special=("<|im_end|>", "<|im_start|>"), chat_template=TEMPLATE)
    save_config("Qwen2", folder, tokenizer=False, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, max_position_embeddings=256)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


class Served:
    """A server in a thread of this process, and how to ask it."""

    def __init__(self, folder: str, key: str = "") -> None:
        self.engine = EmbeddedRollout(Model(folder), EngineSettings(max_running=64))
        self.engine.start()
        self.generator = Generator(self.engine)
        self.generator.open()
        self.server = ChatServer(self.generator, self.engine, "tiny", key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.server.application(), log_level="warning", lifespan="off", ws="none"))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()

    def post(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/chat/completions", json={"model": "tiny", "messages": HELLO, **body}, headers=headers, timeout=120, trust_env=False
        )

    def text(self, **body: Any) -> str:
        found = self.post(**body).json()
        return str(found["choices"][0]["message"]["content"])

    def streamed(self, **body: Any) -> tuple[str, list[dict[str, Any]]]:
        """The text of the pieces, and all chunks."""
        lines = [line for line in self.post(stream=True, **body).text.split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        pieces = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
        return "".join(pieces), chunks

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self.generator.close()
        self.engine.stop()


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Served]:
    one = Served(folder)
    yield one
    one.close()


def test_an_answer_is_what_the_engine_generates_after_the_chat_template(served: Served, folder: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    engine = EmbeddedRollout(Model(folder), EngineSettings())
    engine.start()
    engine.add([Request(0, tuple(prompt), 0, Sampling(12, temperature=0))])
    found: list[Generated] = []
    while engine.num_unfinished:
        found += engine.step()
    engine.stop()
    said = served.post(temperature=0, max_tokens=12, logprobs=True).json()
    choice = said["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": found[0].text}
    assert choice["finish_reason"] == {Finish.STOP: "stop", Finish.LENGTH: "length"}[found[0].finish]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(found[0].logprobs.tolist(), abs=1e-5)
    assert said["usage"]["prompt_tokens"] == len(prompt)
    assert said["usage"]["completion_tokens"] == len(found[0].tokens)


def test_a_seed_gives_the_same_answer_however_many_ask_at_once(served: Served) -> None:
    alone = [served.text(seed=seed, max_tokens=10) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda seed: served.text(seed=seed, max_tokens=10), range(12)))
    assert together == alone
    assert len(set(alone)) > 6
    several = served.post(seed=3, n=4, max_tokens=10).json()["choices"]
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert len({one["message"]["content"] for one in several}) > 1
    assert served.text(max_tokens=10) != served.text(max_tokens=10) or served.text(max_tokens=10) != served.text(max_tokens=10)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("letters", ["", "abc é"])
def test_the_pieces_of_a_stream_are_the_answer(served: Served, seed: int, letters: str) -> None:
    body = {"seed": seed, "max_tokens": 60, "logit_bias": dict.fromkeys(served.engine.language().encode_target(letters), 30)}
    whole = served.post(**body).json()
    text, chunks = served.streamed(**body, stream_options={"include_usage": True})
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == [whole["choices"][0]["finish_reason"]]
    if letters:
        cut = served.text(**body, stop="ab")
        assert cut == text.partition("ab")[0]
        assert served.streamed(**body, stop=["ab", "zz"])[0] == cut


def asked_by(path: str, **body: Any) -> dict[str, Any]:
    """The same question as `HELLO`, as each API asks it."""
    if path == "responses":
        return {"model": "tiny", "instructions": HELLO[0]["content"], "input": HELLO[1:], "max_output_tokens": 20, **body}
    return {"model": "tiny", "system": HELLO[0]["content"], "messages": HELLO[1:], "max_tokens": 20, **body}


def said_by(path: str, answer: dict[str, Any]) -> tuple[str, int, int]:
    content = answer["output"][0]["content"] if path == "responses" else answer["content"]
    return content[0]["text"], answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]


def pieces_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_the_other_two_apis_answer_what_chat_completions_does_whole_and_in_pieces(served: Served, path: str) -> None:
    chat = served.post(temperature=0, max_tokens=20).json()
    expected = (chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
    body = asked_by(path, temperature=0)
    whole = httpx.post(f"{served.url}/{path}", json=body, timeout=120, trust_env=False)
    assert whole.status_code == 200, whole.text
    assert said_by(path, whole.json()) == expected
    assert whole.json()["model"] == "tiny"
    streamed = pieces_of(httpx.post(f"{served.url}/{path}", json={**body, "stream": True}, timeout=120, trust_env=False).text)
    deltas = [one["delta"] for one in streamed if one["type"] in ("response.output_text.delta", "content_block_delta")]
    assert "".join(one if isinstance(one, str) else one["text"] for one in deltas) == expected[0]
    if path == "responses":
        assert [one["sequence_number"] for one in streamed] == list(range(len(streamed)))
        last = streamed[-1]["response"]
        assert {**last, "id": "", "created_at": 0} | {"output": []} == {**whole.json(), "id": "", "created_at": 0} | {"output": []}
        assert said_by(path, last) == expected
    else:
        assert streamed[0]["message"]["usage"]["input_tokens"] == expected[1]
        assert (streamed[-2]["usage"]["output_tokens"], streamed[-2]["delta"]["stop_reason"]) == (expected[2], whole.json()["stop_reason"])
        counted = httpx.post(f"{served.url}/messages/count_tokens", json=body, timeout=120, trust_env=False)
        assert counted.json() == {"input_tokens": expected[1]}


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_stream_of_the_other_two_apis_comes_in_more_than_one_piece(served: Served, path: str) -> None:
    limit = {"responses": "max_output_tokens", "messages": "max_tokens"}[path]
    text = httpx.post(
        f"{served.url}/{path}", json=asked_by(path, stream=True, temperature=0, **{limit: 180}), timeout=120, trust_env=False
    ).text
    deltas = [one for one in pieces_of(text) if one["type"] in ("response.output_text.delta", "content_block_delta")]
    assert len(deltas) > 1


@pytest.mark.parametrize(
    ("path", "more", "status", "says"),
    [
        ("responses", {"model": "gpt-9"}, 404, "there is 'tiny': ask for that, or serve it by the other name: m2flow serve --name 'gpt-9'"),
        ("messages", {"model": "claude"}, 404, "there is 'tiny'"),
        ("responses", {"previous_response_id": "r"}, 400, "previous_response_id"),
        ("responses", {"tool_choice": "required"}, 400, "tool_choice"),
        ("responses", {"temperature": -1}, 400, "temperature"),
        ("messages", {"max_tokens": 0}, 400, "max_tokens"),
        ("messages", {"messages": [{"role": "user", "content": "a" * 1000}]}, 400, "context"),
        ("messages/count_tokens", {"messages": []}, 400, "messages"),
    ],
)
def test_what_the_other_two_apis_can_not_do_is_refused_by_name(
    served: Served, path: str, more: dict[str, Any], status: int, says: str
) -> None:
    found = httpx.post(f"{served.url}/{path}", json=asked_by(path, **more), timeout=120, trust_env=False)
    assert found.status_code == status, found.text
    assert says in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "completions", 404, "POST /v1/completions is not supported: there are /v1/chat/completions"),
        ("POST", "embeddings", 404, "POST /v1/embeddings is not supported"),
        ("GET", "chat/completions", 405, "GET /v1/chat/completions is not supported"),
        ("GET", "models/gpt-9", 404, "there is no model 'gpt-9' here"),
    ],
)
def test_a_path_that_is_not_served_is_refused_by_name(served: Served, method: str, path: str, status: int, says: str) -> None:
    found = httpx.request(method, f"{served.url}/{path}", timeout=120, trust_env=False)
    assert found.status_code == status
    assert says in found.json()["error"]["message"]


def test_a_client_may_ask_about_the_model_by_its_name(served: Served) -> None:
    found = httpx.get(f"{served.url}/models/tiny", timeout=120, trust_env=False)
    assert (found.status_code, found.json()["id"]) == (200, "tiny")


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "gpt-9"}, 404, "there is 'tiny'"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"presence_penalty": 1}, 400, "presence_penalty is not supported"),
        ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"messages": "hello"}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 0}, 400, "n:"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias has a token outside of 0..257"),
        ({"messages": [{"role": "user", "content": "a" * 1000}]}, 400, "context"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(served: Served, body: dict[str, Any], status: int, says: str) -> None:
    found = served.post(**body)
    assert found.status_code == status
    assert says in found.json()["error"]["message"]
    assert served.text(temperature=0, max_tokens=4)


def test_nonsense_on_the_wire_is_an_error_object_and_the_server_goes_on(served: Served) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"[]", b'{"model": "tiny"}', b"null"):
        found = httpx.post(f"{served.url}/chat/completions", content=content, trust_env=False)
        assert found.status_code == 400
        assert found.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{served.url}/models", trust_env=False).json()["data"][0]["id"] == "tiny"


def test_other_sites_and_callers_without_the_key_are_turned_away(served: Served, folder: str) -> None:
    assert served.post({"host": "evil.example"}).status_code == 403
    keyed = Served(folder, KEY)
    try:
        assert keyed.post().status_code == 401
        assert keyed.post({"authorization": "Bearer no"}).status_code == 401
        assert keyed.post({"authorization": f"Bearer {KEY}"}, max_tokens=2).status_code == 200
        ask = {"json": asked_by("messages", max_tokens=2), "timeout": 120, "trust_env": False}
        for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": KEY}, 200)):
            assert httpx.post(f"{keyed.url}/messages", headers=headers, **ask).status_code == status  # type: ignore[arg-type]
    finally:
        keyed.close()


def leave_a_stream(url: str) -> None:
    with httpx.Client(trust_env=False) as client, client.stream("POST", url, json={**LONG, "stream": True}, timeout=120) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")


def time_out(url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=LONG, timeout=0.3, trust_env=False)


@pytest.mark.parametrize("leave", [leave_a_stream, time_out])
def test_a_client_that_goes_away_frees_its_place(served: Served, leave: Callable[[str], None]) -> None:
    leave(f"{served.url}/chat/completions")
    assert served.engine.num_unfinished or leave is leave_a_stream
    for _ in range(600):
        if not served.engine.num_unfinished:
            break
        time.sleep(0.05)
    assert not served.engine.num_unfinished
    assert served.text(temperature=0, max_tokens=4)


def test_tool_calls_are_read_from_whole_answers_alone_and_arguments_go_both_ways(served: Served) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "8", "tool_call_id": "1"},
    ]
    asked = Asked.model_validate({"model": "tiny", "messages": messages, "tools": [TOOL]})
    language = served.engine.language()
    assert "<tool_call>7</tool_call>" in language.conversation(asked.conversation, asked.shown_tools)
    assert served.post(messages=messages, tools=[TOOL], max_tokens=3).status_code == 200
    text = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    def choice(finish: Finish, text: str = text, asked: Asked = asked) -> Any:
        tokens = [*language.encode_target(text), 0]
        columns = (
            np.array(tokens, np.int32),
            np.zeros(len(tokens), np.float32),
            np.zeros(len(tokens), np.int32),
            np.zeros(len(tokens), bool),
        )
        generated = Generated(0, np.array([1], np.int32), *columns, finish, text)

        async def made() -> Any:
            one = _Running(asyncio.get_running_loop(), asyncio.Event(), False, done=generated)
            return served.server._choice(asked, 0, one)

        return asyncio.run(made())

    whole, cut = choice(Finish.STOP), choice(Finish.LENGTH)
    assert (whole.text, whole.finish, whole.calls[0].name, dict(whole.calls[0].arguments)) == ("So:", "tool_calls", "add", {"a": 1})
    assert (cut.text, cut.finish, cut.calls) == (text, "length", ())
    one_call = asked.model_copy(update={"parallel_tool_calls": False})
    one, several = choice(Finish.STOP, text, one_call), choice(Finish.STOP, text * 2, one_call)
    assert (len(one.calls), one.finish) == (1, "tool_calls")
    assert (several.text, several.finish, several.calls) == (text * 2, "stop", ())
    assert len(choice(Finish.STOP, text * 2).calls) == 2


def test_the_openai_client_gets_answers_streams_and_errors(served: Served) -> None:
    openai = pytest.importorskip("openai", reason=NO_CLIENT.format("openai"))
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=2)
    ask = {"model": "tiny", "messages": HELLO, "seed": 5, "max_tokens": 20}
    whole = client.chat.completions.create(**ask)
    pieces = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices) == whole.choices[0].message.content
    assert client.models.list().data[0].id == "tiny"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(**ask, frequency_penalty=1.0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001, max_retries=1).chat.completions.create(**ask)
    assert client.chat.completions.create(**ask).choices[0].message.content == whole.choices[0].message.content


def test_the_client_of_openai_reads_responses_and_that_of_anthropic_messages(served: Served) -> None:
    openai = pytest.importorskip("openai", reason=NO_CLIENT.format("openai"))
    anthropic = pytest.importorskip("anthropic", reason=NO_CLIENT.format("anthropic"))
    with openai.OpenAI(base_url=served.url, api_key="none") as client:
        ask = asked_by("responses", temperature=0)
        whole = client.responses.create(**ask)
        with client.responses.stream(**ask) as stream:
            assert "".join(one.delta for one in stream if one.type == "response.output_text.delta") == whole.output_text
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(**ask, previous_response_id="r")
    with anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="none") as other:
        ask = asked_by("messages", extra_body={"temperature": 0})
        assert other.messages.create(**ask).content[0].text == whole.output_text
        with other.messages.stream(**ask) as stream:
            assert stream.get_final_text() == whole.output_text
        counted = other.messages.count_tokens(**{name: value for name, value in ask.items() if name != "max_tokens"})
        assert counted.input_tokens == whole.usage.input_tokens


def test_the_command_serves_a_model_until_it_is_interrupted(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "m2flow", "serve", "--model", folder, "--name", "tiny", "--port", "0", "--device", "cpu"]
    with programs.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "seed": 1}
        assert httpx.post(f"{url}/chat/completions", json=asked, timeout=120, trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "loading tiny on cpu\n")


def last_token(sample: Sample) -> float:
    return float(sample.tokens[-1] % 7)


@flow
def brief(model: str) -> None:
    policy, judge = Policy(model, optimizer=AdamW(1e-2)), Reward(last_token)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
    for _ in steps(2):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
        policy.update(responses, judge.score(responses))


@pytest.fixture(scope="module")
def runs(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of runs, with one of two steps."""
    runs_dir = tmp_path_factory.mktemp("runs")
    spec = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="embedded"), train=TrainSpec(engine="embedded"))
    Run(brief, {"model": folder}, spec, RunSettings(runs_dir=str(runs_dir), checkpoint_steps=1, eager=True)).execute()
    return runs_dir


def greedy(model: str | Path, num_tokens: int) -> tuple[str, list[float]]:
    """What a model says after `HELLO` by its best tokens, and their log-probabilities: by transformers, without a cache."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    ids, logprobs = list(tokenizer(text, add_special_tokens=False).input_ids), list[float]()
    forward, num_prompt = transformers.AutoModelForCausalLM.from_pretrained(model).eval(), len(ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            found = forward(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1).max(-1)
        ids, logprobs = [*ids, int(found.indices)], [*logprobs, float(found.values)]
        if ids[-1] == 0:
            break
    return tokenizer.decode(ids[num_prompt:], skip_special_tokens=True), logprobs


@pytest.mark.parametrize("options", [("--step", "1"), ()], ids=["a step", "the end"])
def test_the_command_serves_the_model_that_a_run_has_trained(options: tuple[str, ...], runs: Path, folder: str, tmp_path: Path) -> None:
    (run,) = runs.iterdir()
    which = ["--runs-dir", str(runs)] if options else [str(run)]  # The newest one, or by its directory.
    exported = CliRunner().invoke(cli, ["export", str(run), *options, "--out", str(tmp_path / "model")])
    assert exported.exit_code == 0, exported.output
    text, logprobs = greedy(tmp_path / "model", 8)
    with programs.Popen(
        [sys.executable, "-u", "-m", "m2flow", "serve", *which, *options, "--port", "0", "--device", "cpu", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        url, _, name, *_ = process.stdout.readline().split()
        body = {"model": name, "messages": HELLO, "temperature": 0, "max_tokens": 8, "logprobs": True}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=120, trust_env=False).json()
        refused = httpx.post(f"{url}/chat/completions", json={**body, "model": "other"}, timeout=120, trust_env=False)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, f"loading {run.name} on cpu\n")
    assert (name, refused.status_code) == (run.name, 404)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-4)
    assert logprobs != pytest.approx(greedy(folder, 8)[1], abs=1e-2), "training changes what is said"


def test_an_open_address_asks_for_a_key(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "m2flow", "serve", "--model", folder, "--host", "0.0.0.0", "--port", "0"]
    done = programs.run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no key" in done.stderr
