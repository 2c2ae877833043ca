"""Requests under way before anybody asks for them, over answers that need no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from replaykit.distributed.requests import RequestQueue


class Answer:
    """A reply that comes when the test says so."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.there = False
        self.small = False

    def say(self, value: Any) -> None:
        self.value, self.there = value, True

    def sent(self) -> None:
        pass

    def is_ready(self) -> bool:
        return self.there

    def get(self, timeout: float | None = None) -> Any:
        if not self.there:
            assert timeout is not None, "would wait for ever"
            raise TimeoutError
        if isinstance(self.value, Exception):
            self.error = self.value
            raise self.error
        return self.value


class Actor:
    """Notes the requests; answers are numbered in their order."""

    def __init__(self) -> None:
        self.sent: list[Answer] = []
        self.messages: list[int] = []
        self.answered = 0

    def request(self, count: int = 1) -> Any:
        new = [Answer() for _ in range(count)]
        self.sent += new
        self.messages.append(count)
        return new

    def answer(self, *errors: Exception) -> None:
        """Answers all requests, the first of them with errors."""
        for answer in self.sent[self.answered :]:
            answer.say(errors[0] if errors else self.answered)
            errors = errors[1:]
            self.answered += 1


def test_polling_sends_no_further_requests() -> None:
    """What is not there yet stays under way; nothing is asked for in its place."""
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=4)
    for _ in range(50):
        with pytest.raises(TimeoutError):
            ahead.next(timeout=0.0)
    assert len(actor.sent) == 5
    actor.answer()
    assert [ahead.next(timeout=0.0) for _ in range(2)] == [0, 1]
    assert len(actor.sent) == 6
    actor.answer()
    assert [ahead.next() for _ in range(4)] == [2, 3, 4, 5]


def test_without_depth_each_request_is_made_when_it_is_asked_for() -> None:
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=0)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    assert len(actor.sent) == 1
    actor.answer()
    assert ahead.next() == 0
    assert len(actor.sent) == 1


def test_an_error_drops_no_batch_that_was_drawn() -> None:
    """Each batch that the actor has answered with is handed out, in order."""
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=4)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    actor.answer(ValueError("a bad row"), ValueError("another"))
    assert [ahead.next() for _ in range(3)] == [2, 3, 4]
    actor.answer()
    assert [ahead.next(timeout=0.0) for _ in range(3)] == [5, 6, 7]


def test_an_error_of_a_request_made_for_this_call_is_raised() -> None:
    """Those that were made before may have come too early, and are only passed over."""
    actor = Actor()

    def refused(count: int) -> Any:
        answers = actor.request(count)
        answers[0].say(RuntimeError(f"request {len(actor.sent)}"))
        return answers

    ahead = RequestQueue(refused, depth=2)
    with pytest.raises(RuntimeError, match=r"request 1$"):
        ahead.next()
    with pytest.raises(RuntimeError, match=r"request 4$"):
        ahead.next()
    ahead._request = actor.request
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    assert len(actor.sent) == 9


def small(actor: Actor) -> None:
    """Answers all requests with batches that are known to be small."""
    for answer in actor.sent:
        answer.small = True
    actor.answer()


@pytest.mark.parametrize(("depth", "together"), [(2, 1), (4, 2), (5, 2), (8, 4), (9, 4)])
def test_small_batches_are_asked_for_together(depth: int, together: int) -> None:
    """In order, none before there is room: never more of them than ``depth`` after a call, and less
    by what one message asks for, but one."""
    actor = Actor()
    ahead = RequestQueue(actor.request, depth, together=together)
    taken = []
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    assert actor.messages == [1] * (depth + 1)
    for number in range(6 * depth):
        small(actor)
        taken.append(ahead.next(timeout=0.0))
        under_way = len(actor.sent) - len(taken)
        assert depth - together < under_way <= depth
        if number > depth:
            assert under_way >= depth + 1 - together
    assert taken == list(range(6 * depth))
    assert set(actor.messages[depth + 1 :]) == {together}


def test_batches_are_asked_for_one_by_one_while_they_are_large() -> None:
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=4, together=2)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    for turn in range(12):
        actor.answer()
        for answer in actor.sent:
            answer.small = turn >= 6
        assert ahead.next(timeout=0.0) == turn
    later = actor.messages.index(2)
    assert later >= 10
    assert set(actor.messages[:later]) == {1}
    assert set(actor.messages[later:]) == {2}


def test_dropped_requests_are_sent_again_immediately() -> None:
    """The whole depth of it; what was taken before comes as it would have."""
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=4, together=2)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    small(actor)
    assert ahead.next() == 0
    held = ahead.take()
    ahead.drop()
    before = len(actor.sent)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    assert len(actor.sent) - before == 5
    small(actor)
    assert held.get() == 1
    assert [ahead.next() for _ in range(3)] == [before, before + 1, before + 2]


def test_one_error_of_a_message_leaves_its_other_batches() -> None:
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=4, together=2)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    small(actor)
    assert [ahead.next(timeout=0.0) for _ in range(3)] == [0, 1, 2]
    assert actor.messages == [1] * 5 + [2]
    actor.answer(ValueError("the first of two"))
    assert [ahead.next(timeout=0.0) for _ in range(3)] == [3, 4, 6]


class Interrupted(Answer):
    """The user's Ctrl-C comes while it is waited for, or the answer just after the timeout."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.once: BaseException | None = error

    def get(self, timeout: float | None = None) -> Any:
        if self.once is not None:
            error, self.once = self.once, None
            self.say("drawn")
            raise error
        return super().get(timeout)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError()], ids=repr)
def test_batch_that_arrives_as_a_wait_ends_is_the_next(error: BaseException) -> None:
    answers: list[Any] = [Interrupted(error), *(Answer() for _ in range(5))]
    ahead = RequestQueue(lambda _: [answers.pop(0)], depth=2)
    with pytest.raises(type(error)):
        ahead.next(timeout=1.0)
    assert ahead.next() == "drawn"


# -- without waiting --------------------------------------------------------------------------


def test_error_of_an_early_request_reaches_no_other_request() -> None:
    """It is told to whoever's own request failed, once; others get what was drawn."""
    actor = Actor()
    ahead = RequestQueue(actor.request, depth=2)
    first = ahead.take()
    actor.answer(*(RuntimeError(f"request {number}") for number in range(3)))
    assert first.is_ready()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="request 0"):
            first.get()
    second = ahead.take()
    assert not second.is_ready()  # two failed before it was asked for
    actor.answer()
    assert second.is_ready()
    assert second.get() == second.get() == 3
    assert ahead.next() == 4
