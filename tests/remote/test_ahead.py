"""Requests under way before anybody asks for them, over answers that need no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from replaykit.remote.ahead import Ahead


class Answer:
    """A reply that comes when the test says so."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.there = False

    def say(self, value: Any) -> None:
        self.value, self.there = value, True

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
        self.answered = 0

    def request(self) -> Any:
        self.sent.append(Answer())
        return self.sent[-1]

    def answer(self, *errors: Exception) -> None:
        """Answers all requests, the first of them with errors."""
        for answer in self.sent[self.answered :]:
            answer.say(errors[0] if errors else self.answered)
            errors = errors[1:]
            self.answered += 1


def test_polling_sends_no_further_requests() -> None:
    """What is not there yet stays under way; nothing is asked for in its place."""
    actor = Actor()
    ahead = Ahead(actor.request, depth=4)
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
    ahead = Ahead(actor.request, depth=0)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    assert len(actor.sent) == 1
    actor.answer()
    assert ahead.next() == 0
    assert len(actor.sent) == 1


def test_an_error_drops_no_batch_that_was_drawn() -> None:
    """Each batch that the actor has answered with is handed out, in order."""
    actor = Actor()
    ahead = Ahead(actor.request, depth=4)
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    actor.answer(ValueError("a bad row"), ValueError("another"))
    assert [ahead.next() for _ in range(3)] == [2, 3, 4]
    actor.answer()
    assert [ahead.next(timeout=0.0) for _ in range(3)] == [5, 6, 7]


def test_an_error_of_a_request_made_for_this_call_is_raised() -> None:
    """Those that were made before may have come too early, and are only passed over."""
    actor = Actor()

    def refused() -> Any:
        answer = actor.request()
        answer.say(RuntimeError(f"request {len(actor.sent)}"))
        return answer

    ahead = Ahead(refused, depth=2)
    with pytest.raises(RuntimeError, match=r"request 1$"):
        ahead.next()
    with pytest.raises(RuntimeError, match=r"request 4$"):
        ahead.next()
    ahead._request = actor.request
    with pytest.raises(TimeoutError):
        ahead.next(timeout=0.0)
    assert len(actor.sent) == 9


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
def test_a_batch_that_comes_as_a_wait_ends_is_the_next(error: BaseException) -> None:
    answers: list[Any] = [Interrupted(error), *(Answer() for _ in range(5))]
    ahead = Ahead(iter(answers).__next__, depth=2)
    with pytest.raises(type(error)):
        ahead.next(timeout=1.0)
    assert ahead.next() == "drawn"
