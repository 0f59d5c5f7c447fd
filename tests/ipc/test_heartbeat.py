"""The clocks of a connection."""

from headrace.ipc.heartbeat import Backoff, Heartbeat


def test_the_first_beat_is_due_at_once_and_the_next_after_the_interval() -> None:
    heartbeat = Heartbeat(0.5, 10.0, now=100.0)
    assert heartbeat.due(100.0)
    heartbeat.sent(100.0)
    assert not heartbeat.due(100.4)
    assert heartbeat.due(100.5)


def test_missed_beats_are_not_made_up_for() -> None:
    heartbeat = Heartbeat(0.5, 10.0, now=100.0)
    heartbeat.sent(200.0)
    assert not heartbeat.due(200.4)


def test_silence_is_counted_from_the_last_word() -> None:
    heartbeat = Heartbeat(0.5, 10.0, now=100.0)
    assert not heartbeat.is_dead(110.0)
    assert heartbeat.is_dead(110.1)
    heartbeat.heard(109.0)
    assert heartbeat.silence_s(112.0) == 3.0
    assert not heartbeat.is_dead(119.0)
    assert heartbeat.is_dead(119.5)


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(low_s=0.1, high_s=0.5, steady_s=1.0)
    assert [backoff.after(0.0) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_connection_that_lasted_makes_the_wait_short_again() -> None:
    backoff = Backoff(low_s=0.1, high_s=0.5, steady_s=1.0)
    for _ in range(4):
        backoff.after(0.0)
    assert backoff.after(1.5) == 0.1
    assert backoff.after(0.0) == 0.2
