"""Which turns an engine is given, and which episodes begin: as its cache holds their contexts, and never another answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from played_episodes import begun, played, same, stopped_row, wanderer

from m2flow import Chat, Sample, agent
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.agents.turn_requests import TurnQueue, Waiting
from m2flow.engines.contract import EngineSettings, Occupancy
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Model
from m2flow.testing.fakes import FakeRollout


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def queue_of(capacity: int, num_slots: int = 2) -> TurnQueue:
    queue = TurnQueue(num_slots)
    queue.look(lambda: Occupancy(0, kv_capacity=capacity))
    return queue


def order(queue: TurnQueue, *episodes: int, num_free: int = 1) -> list[int]:
    """Which of these are given their turns; they have asked in this order."""
    asked: dict[int, Any] = {packed: packed for packed in episodes}
    return list(queue.chosen(asked, num_free))  # type: ignore[arg-type]


def turn(queue: TurnQueue, episode: int, num_tokens: int) -> None:
    queue.asked(episode, num_tokens)
    queue.given(episode, num_tokens)
    queue.answered(episode, num_tokens)


def test_an_engine_without_a_limit_is_given_everything_as_it_came():
    queue = TurnQueue(0)
    assert order(queue, 3, 1, 2, num_free=queue.num_free(1000)) == [3, 1, 2]
    assert queue.num_to_begin([10, 20, 30], 0) == 3


def test_what_waits_is_listed_without_a_cached_context_first_and_of_these_what_asked_last():
    queue = queue_of(100, num_slots=8)
    for packed, num_tokens in ((1, 30), (2, 60), (3, 20)):
        turn(queue, packed, num_tokens)
    queue.asked(1, 40), queue.asked(3, 25), queue.asked(2, 70)
    assert queue.last([1, 3, 2]) == [Waiting(1, 40, 0), Waiting(2, 70, 60), Waiting(3, 25, 20)]
    assert queue.turn_tokens == 0.0
    queue.given(1, 40)
    queue.answered(1, 48)
    assert queue.turn_tokens == 2.0, "of four turns, three of which had no token of their own"


def test_an_engine_that_does_not_say_what_its_cache_holds_is_taken_to_have_what_it_has_read():
    queue = queue_of(0)
    turn(queue, 1, 30)
    queue.asked(1, 40), queue.asked(2, 10)
    assert queue.last([1, 2]) == [Waiting(2, 10, 0), Waiting(1, 40, 40)]


def test_as_long_as_contexts_fit_turns_go_in_the_order_in_which_they_were_asked_for():
    queue = queue_of(1000)
    for packed in (3, 1, 2):
        queue.asked(packed, 10)
    assert order(queue, 3, 1, 2, num_free=2) == [3, 1]
    assert order(queue, 3, 1, 2, num_free=0) == []


@pytest.mark.parametrize(("lengths", "first"), [([2, 3, 4, 5, 6] * 4, 100), ([1] * 19 + [20], 105), ([1] * 12 + [12] * 4, 105)])
def test_the_turn_of_the_episode_goes_first_that_is_expected_to_have_the_most_turns_left(lengths: list[int], first: int):
    """Where all have about as many, that is a fresh one; where most end at once and some go on for long, one that has gone on."""
    queue = queue_of(10**6)
    for packed, num_turns in enumerate(lengths):
        for _ in range(num_turns):
            turn(queue, packed, 10)
        queue.ended(packed, is_over=True)
    for packed, num_turns in ((100, 0), (105, 5)):
        for _ in range(num_turns):
            turn(queue, packed, 10)
        queue.asked(packed, 10)
    assert order(queue, 100, 105) == [first]


def test_episodes_that_did_not_end_here_do_not_count_as_short_ones():
    queue = queue_of(10**6)
    for packed in range(40):
        turn(queue, packed, 10)
        if packed >= 20:
            turn(queue, packed, 10)
        queue.ended(packed, is_over=packed >= 20)  # Half of them were preempted after a turn.
    turn(queue, 100, 10)
    for packed in (100, 101):
        queue.asked(packed, 10)
    assert order(queue, 100, 101) == [101]


def test_once_contexts_do_not_fit_those_go_first_that_the_cache_has():
    queue = queue_of(100)
    for packed in range(5):
        turn(queue, packed, 30)
    for packed in range(6):
        queue.asked(packed, 30)
    assert order(queue, *range(6), num_free=3) == [2, 3, 4]
    turn(queue, 5, 30)
    assert order(queue, *range(6), num_free=3) == [3, 4, 5]
    queue.taken_back(5)
    queue.given(3, 80)
    queue.answered(3, 80)
    assert order(queue, *range(6), num_free=2) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_cache_has_is_what_an_engine_keeps_that_evicts_what_was_used_last(seed: int):
    """Against a plain list of what was used, the latest at the end, which runs over the same capacity."""
    rng, capacity = random.Random(seed), 100
    queue, used, running = queue_of(capacity), [], {}
    for packed in range(8):
        queue.asked(packed, 0)
    for _ in range(200):
        packed = rng.randrange(8)
        if packed in running:
            size = running.pop(packed) + rng.randrange(10)
            used.append((packed, size))
            queue.answered(packed, size)
        else:
            used = [one for one in used if one[0] != packed]
            running[packed] = rng.randrange(1, 30)
            queue.given(packed, running[packed])
        while used and sum(size for _, size in used) + sum(running.values()) > capacity:
            del used[0]
        cached = {one for one, _ in used}
        waiting = [one for one in range(8) if one not in running]
        for one in waiting:
            queue.asked(one, 50)  # All together do not fit.
        if len(waiting) > 2:
            found = order(queue, *waiting, num_free=len(waiting) - 1)
            assert found == sorted(waiting, key=lambda one: one not in cached)[: len(found)]


def test_a_turn_is_passed_over_only_so_often():
    queue = queue_of(100, num_slots=1)
    for packed in range(4):
        turn(queue, packed, 30)
    queue.asked(0, 30)  # Its context is the one that the cache has lost.
    num_before = 0
    while order(queue, 0, 3) == [3] and num_before < 1000:
        turn(queue, 3, 30)
        num_before += 1
    assert num_before == 64
    for packed in range(4, 100):
        queue.begun(packed, 30)
    assert order(queue, 0, 3) == [3], "of more episodes it has to wait for more"


@pytest.mark.parametrize("capacity", [1000, 100], ids=["contexts fit", "they do not"])
def test_an_episode_that_was_moved_here_stands_where_it_would_had_it_waited_here_all_the_time(capacity):
    queue = queue_of(capacity, num_slots=1)
    for packed in (1, 2):
        queue.asked(packed, 30)
        time.sleep(0.002)
    since = time.monotonic()
    time.sleep(0.01)
    for packed in (3, 4):
        queue.asked(packed, 30)
        time.sleep(0.002)
    queue.begun(5, 30, num_turns=3)
    queue.asked(5, 30, waited_s=time.monotonic() - since)
    assert order(queue, 1, 2, 3, 4, 5, num_free=5)[:1] == [1]
    given = []
    while left := [packed for packed in (1, 2, 3, 4, 5) if packed not in given]:
        given += order(queue, *left)
        queue.given(given[-1], 30)
        queue.taken_back(given[-1])
    assert given == [1, 2, 5, 3, 4]


def test_a_moved_episode_is_passed_over_no_longer_than_those_that_asked_after_it():
    queue = queue_of(10, num_slots=1)
    queue.begun(1, 30)
    for packed in (1, 2):
        queue.asked(packed, 30)
    turn(queue, 9, 3)
    for _ in range(200):
        turn(queue, 9, 3)
    queue.asked(5, 30, waited_s=1000.0)
    queue.asked(9, 3)
    given = []
    while left := [packed for packed in (1, 2, 5, 9) if packed not in given]:
        given += order(queue, *left)
        queue.given(given[-1], 3)
        queue.taken_back(given[-1])
    assert given == [5, 1, 2, 9], "three of them have waited for 200 turns, and the cache has the fourth"


def test_what_a_moved_episode_had_elsewhere_counts_as_turns_and_not_as_context_here():
    queue = queue_of(0)
    queue.begun(1, 30, num_turns=3)
    queue.asked(1, 30, waited_s=1.0)
    assert queue.last([1]) == [Waiting(1, 30, 0)]
    assert queue.waited_s(1) >= 1.0
    queue.given(1, 30)
    queue.answered(1, 35)
    queue.asked(1, 36)
    assert queue.last([1]) == [Waiting(1, 36, 36)]
    queue.begun(2, 30)
    for _ in range(20):
        queue.begun(3, 5)
        turn(queue, 3, 5)
        queue.ended(3, is_over=True)
    queue.asked(2, 30)
    assert order(queue, 1, 2) == [2], "of one that has had four turns less is expected than of one that begins"


def test_an_engine_is_given_no_more_contexts_at_once_than_its_cache_holds():
    queue = queue_of(100, num_slots=8)
    for packed in range(5):
        queue.asked(packed, 40)
    assert order(queue, *range(5), num_free=8) == [0, 1]
    queue.given(0, 40)
    assert order(queue, *range(1, 5), num_free=7) == [1]
    queue.given(1, 40)
    assert order(queue, 2, 3, 4, num_free=6) == []
    queue.answered(0, 45)
    assert order(queue, 2, 3, 4, num_free=7) == [2]
    queue.answered(1, 45)
    queue.asked(5, 1000)
    assert order(queue, 5, 2, num_free=8) == [5], "one that alone is too large is the engine's to refuse"


def test_episodes_begin_as_their_contexts_fit_and_beyond_only_for_a_free_place():
    queue = queue_of(100)
    assert queue.num_to_begin([30] * 9, 0) == 3
    assert queue.num_to_begin([30] * 9, 5) == 5
    for packed in range(3):
        queue.begun(packed, 30)
    assert queue.num_to_begin([30] * 9, 3) == 0, "those that have just begun will ask for these places"
    for packed in range(3):
        turn(queue, packed, 30)
    time.sleep(0.02)  # They wait for tools.
    assert queue.num_to_begin([30] * 9, 2) == 2
    queue.ended(0, is_over=True)
    assert queue.num_to_begin([30] * 9, 0) == 1
    assert queue_of(0).num_to_begin([30] * 9, 0) == 9, "of an engine that does not say how large its cache is"


def test_an_episode_that_has_not_ended_is_expected_to_become_as_long_as_others():
    queue = queue_of(1000)
    for packed in range(3):
        turn(queue, packed, 200)
        queue.ended(packed, is_over=True)
    assert queue.num_to_begin([10] * 100, 0) == 5


def test_others_requests_in_the_engine_leave_half_its_places_to_turns():
    queue = queue_of(0, num_slots=4)
    assert queue.num_free(0) == 4
    assert queue.num_free(4) == queue.num_free(40) == 2, "samples that are no episodes may come without end"
    queue.given(0, 10)
    assert queue.num_free(1) == 3
    assert queue.num_free(5) == 1
    queue.given(1, 10)
    assert queue.num_free(6) <= 0
    assert queue.num_free(3) == 1


def test_a_cache_that_is_lost_has_no_context():
    queue = queue_of(100)
    for packed in range(5):
        turn(queue, packed, 30)
    for packed in range(6):
        queue.asked(packed, 30)
    assert order(queue, *range(6), num_free=2) == [2, 3]
    queue.cache_lost()
    assert order(queue, *range(6), num_free=2) == [0, 1]
    queue.look(lambda: Occupancy(0, kv_capacity=10**6))
    assert order(queue, *range(6), num_free=6) == [0, 1, 2, 3, 4, 5], "it has another size now"


class Counted(dict[int, Any]):
    """Turns that note how many of them were looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[int]:
        for packed in super().__iter__():
            self.num_seen += 1
            yield packed


@pytest.mark.parametrize("kv_capacity", [0, 1000, 10**9])
@pytest.mark.parametrize("num_ended", [0, 40])
def test_to_choose_a_few_of_many_turns_looks_at_few(kv_capacity: int, num_ended: int):
    queue = queue_of(kv_capacity)
    for packed in range(num_ended):
        turn(queue, packed, 10)
        queue.ended(packed, is_over=True)
    asked = Counted({packed: packed for packed in range(100, 5100)})
    for packed in asked:
        queue.asked(packed, 10)
    asked.num_seen = 0
    assert list(queue.chosen(asked, 2)) == [100, 101]
    assert asked.num_seen < 20


class Watched(FakeRollout):
    """A fake engine that notes the most requests that it had."""

    most = 0

    def add(self, requests):  # type: ignore[no-untyped-def]
        super().add(requests)
        self.most = max(self.most, self.num_unfinished)


def speaker_hosts(loop: EventLoop, num_slots: int, kv_capacity: int) -> dict[str, Episodes]:
    found: dict[str, Episodes] = {}
    for role in ("policy", "rival"):
        engine = FakeRollout(Model(role), EngineSettings(options={"kv_capacity": kv_capacity}))
        engine.start()
        found[role] = Episodes(engine, loop, found, num_slots)
    return found


def duel(index: int) -> EpisodeStart:
    @agent
    async def two(chat: Chat, row: Sample) -> float:
        other = chat.conversation("other", by="rival")
        for _ in range(3):
            await chat.say((await other.say("you first", max_tokens=5)).text, max_tokens=4)
        return 1.0

    return begun(index, two, bounds=Bounds(8, max_conversations=2, speakers=(("rival", "rival"),)))


def hosted(loop: EventLoop, num_slots: int, kv_capacity: int, step_ms: float = 0.0) -> tuple[Watched, Episodes]:
    options = {"kv_capacity": kv_capacity, "step_ms": step_ms}
    engine = Watched(Model("fake"), EngineSettings(max_running=num_slots or 256, options=options))
    engine.start()
    return engine, Episodes(engine, loop, num_slots=num_slots)


@pytest.mark.parametrize("num_slots", [1, 3, 16])
@pytest.mark.parametrize("kv_capacity", [0, 1, 300, 10**6])
def test_an_engine_has_no_more_turns_than_it_decodes_at_once_and_the_episodes_are_the_same(
    loop: EventLoop, num_slots: int, kv_capacity: int
):
    _, plain = hosted(loop, 0, 0)
    plain.begin([begun(index, wanderer) for index in range(24)])
    expected = played(plain)
    engine, episodes = hosted(loop, num_slots, kv_capacity)
    episodes.begin([begun(index, wanderer) for index in range(24)])
    found = played(episodes)
    assert 0 < engine.most <= num_slots
    assert found.keys() == expected.keys()
    assert all(same(found[packed], expected[packed]) for packed in expected)


def test_no_more_episodes_are_open_than_the_cache_holds_or_the_engine_decodes(loop: EventLoop):
    open_now, most = 0, 0

    @agent
    async def counted(chat: Chat, row: Sample) -> float:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(3):
            await chat.say(str(row.prompt) * 10, max_tokens=4)
        open_now -= 1
        return 1.0

    _, episodes = hosted(loop, 4, 50, step_ms=4)
    starts = [begun(index, counted) for index in range(30)]
    episodes.begin([replace(start, request=replace(start.request, prompt="x" * 20)) for start in starts])
    assert len(played(episodes)) == 30
    assert 4 <= most < 20


def test_prompts_of_messages_are_as_large_as_what_they_say(loop: EventLoop):
    _, episodes = hosted(loop, 2, 1000)
    starts = [begun(index, wanderer) for index in range(30)]
    prompt = [{"role": "system", "content": None}, {"role": "user", "content": "x" * 200}]
    episodes.begin([replace(start, request=replace(start.request, prompt=prompt)) for start in starts])
    assert len(episodes._starts) == 25
    episodes.abort([start.request.id for start in starts])


def test_an_agent_that_takes_long_to_its_first_turn_holds_no_place_for_ever(loop: EventLoop):
    gone_on = asyncio.Event()

    @agent
    async def opener(chat: Chat, row: Sample) -> float:
        if row.id.row < 2:
            await gone_on.wait()
        else:
            gone_on.set()
        await chat.say("hello", max_tokens=4)
        return 1.0

    _, episodes = hosted(loop, 2, 1)
    episodes.begin([begun(index, opener) for index in range(3)])
    assert len(played(episodes)) == 3


def test_an_episode_that_goes_on_here_after_it_was_moved_begins_and_speaks_before_what_came_later(loop: EventLoop):
    spoke: list[int] = []

    @agent
    async def speaker(chat: Chat, row: Sample) -> float:
        await chat.say("?", max_tokens=3)
        spoke.append(row.id.index)
        return 0.0

    _, episodes = hosted(loop, 1, 10)
    starts = [begun(index, speaker) for index in range(4)]
    *here, moved = [replace(start, request=replace(start.request, prompt="x" * 20)) for start in starts]
    episodes.begin(here)
    episodes.begin([replace(moved, waited_s=100.0)])
    packed = moved.request.id
    assert episodes.waited_us(packed) >= 100e6
    assert len(played(episodes)) == 4
    assert spoke == [0, 3, 1, 2], "one had begun before it came"


def test_an_episode_that_has_not_begun_is_given_up_with_what_it_had(loop: EventLoop):
    _, episodes = hosted(loop, 1, 1)
    episodes.begin([begun(0, wanderer)])
    for _ in range(3):
        episodes.step()
    (half,) = episodes.abort([begun(0, wanderer).request.id])
    assert len(half.tokens)
    starts = [begun(1, wanderer), begun(2, wanderer), begun(0, wanderer, stopped_row(half))]
    episodes.begin(starts)
    waiting = [start.request.id for start in starts[1:]]
    fresh, stopped = episodes.abort(waiting)
    assert not len(fresh.tokens)
    assert same(stopped, half)
    assert list(played(episodes)) == [starts[0].request.id]


@pytest.mark.parametrize(("num_slots", "kv_capacity"), [(1, 1), (3, 300)])
def test_whatever_waits_when_episodes_are_stopped_they_go_on_as_if_nothing_had_happened(loop: EventLoop, num_slots: int, kv_capacity: int):
    """Before they begin, while a turn waits, and while an engine works on one."""
    _, plain = hosted(loop, 0, 0)
    plain.begin([begun(index, wanderer) for index in range(10)])
    expected, dice = played(plain), random.Random(num_slots)
    found: dict[int, Any] = {}
    stopped: dict[int, Any] = {}
    left = {begun(index, wanderer).request.id: index for index in range(10)}
    while left:
        _, episodes = hosted(loop, num_slots, kv_capacity)
        episodes.begin([begun(index, wanderer, stopped.get(packed)) for packed, index in left.items()])
        for _ in range(dice.randint(0, 30)):
            assert episodes.num_unfinished == len(left)
            for made in episodes.step():
                found[made.id] = made
                del left[made.id]
            counts = episodes.progress()
            assert counts.keys() == left.keys()
            assert counts == {made.id: made.num_sampled for made in episodes.snapshot(counts)}
            occupancy = episodes.occupancy()
            assert occupancy.num_running + occupancy.num_queued == len(left)
        for made in episodes.abort(list(left)):
            stopped[made.id] = stopped_row(made) if made.num_sampled else None
        assert (episodes.num_unfinished, episodes.num_away) == (0, 0)
        queue = episodes._queue
        assert not any((queue._contexts, queue._running, queue._expected, queue._asked_at, *queue._waiting.values()))
        assert queue._num_tokens == 0
    assert all(same(found[packed], expected[packed]) for packed in expected)


def test_turns_are_not_kept_from_an_engine_by_samples_that_come_without_end(loop: EventLoop):
    engine, episodes = hosted(loop, 2, 0)
    episode = begun(0, wanderer).request.id
    episodes.begin([begun(0, wanderer)])
    numbers = iter(range(1, 2000))
    ended = list[int]()
    while episode not in ended:
        while engine.num_unfinished < 40:
            engine.add([replace(begun(next(numbers), wanderer).request, prompt="plain")])
        ended = [made.id for made in episodes.step()]


def test_the_queue_of_a_role_that_only_speaks_knows_its_engine_s_cache(loop: EventLoop):
    hosts = speaker_hosts(loop, num_slots=2, kv_capacity=77)
    hosts["policy"].begin([duel(index) for index in range(4)])
    while hosts["policy"].num_unfinished:
        for one in hosts.values():
            one.step()
    assert hosts["rival"]._queue.capacity == hosts["policy"]._queue.capacity == 77


def test_a_limit_of_time_does_not_run_while_a_turn_waits_for_the_engine(loop: EventLoop):
    @agent
    async def twice(chat: Chat, row: Sample) -> float:
        for _ in range(2):
            await chat.say("hello", max_tokens=6)
        return 1.0

    _, episodes = hosted(loop, 1, 0, step_ms=10)
    bounds = Bounds(8, timeout_s=1.0, turn_timeout_s=0.5)
    episodes.begin([begun(index, twice, bounds=bounds) for index in range(16)])
    assert [made.columns["failure"] for made in played(episodes).values()] == [""] * 16


@pytest.mark.parametrize("bounds", [Bounds(8, timeout_s=0.3), Bounds(8, turn_timeout_s=0.3)])
def test_a_limit_of_time_runs_once_the_engine_has_the_turn(loop: EventLoop, bounds: Bounds):
    @agent
    async def slow(chat: Chat, row: Sample) -> float:
        await chat.say("hello", max_tokens=110)
        return 1.0

    _, episodes = hosted(loop, 1, 0, step_ms=100)
    starts = [begun(index, slow, bounds=bounds) for index in range(3)]
    sampling = replace(starts[0].request.sampling, ignore_eos=True)
    episodes.begin([replace(start, request=replace(start.request, sampling=sampling)) for start in starts])
    found = played(episodes).values()
    assert {made.columns["failure"] for made in found} == {"timed_out" if bounds.timeout_s else "turn_timed_out"}
