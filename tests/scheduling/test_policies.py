"""Round policies against event loops that are written by hand."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.scheduling import Buffered, ClientWork, Clock, Deadline, Schedule, Synchronous, Tiers
from fl_lightning.scheduling.hours import DAY, Hours


class Fixed(Clock):
    """Each client always needs the same time."""

    def __init__(self, seconds):
        self.times = seconds

    def seconds(self, client, work, round):
        return self.times[client]


def draw(clients):
    """Return a uniform sampler, as `UniformSampling` for seed 0."""
    return lambda round, size: sorted(
        generator(0, Stream.PARTICIPANTS, round).choice(clients, size, replace=False).tolist()
    )


def schedule(policy, times, min_clients=1):
    return Schedule(policy, Fixed(times), draw(len(times)), [ClientWork(1, 1, 1)] * len(times), 0, min_clients)


def planned(policy, times, size, rounds, **options):
    plans = schedule(policy, times, **options)
    return [plans.plan(round, size) for round in range(1, rounds + 1)]


TIMES = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]


def test_without_a_deadline_the_server_waits_for_the_slowest_participant():
    for round, plan in enumerate(planned(Synchronous(), TIMES, 3, 5), 1):
        assert list(plan.versions) == draw(8)(round, 3)
        assert plan.metrics == {"time/simulated_s": max(TIMES[client] for client in plan.versions)}
        assert set(plan.versions.values()) == {round - 1}


@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.5, None])
@pytest.mark.parametrize("min_clients", [1, 3])
def test_a_deadline_drops_the_late(seconds, min_clients):
    for round, plan in enumerate(planned(Deadline(seconds, 1.5), TIMES, 4, 6, min_clients=min_clients), 1):
        asked = sorted(draw(8)(round, 6), key=lambda client: (TIMES[client], client))
        end = max(seconds or math.inf, TIMES[asked[min_clients - 1]])
        kept = [client for client in asked if TIMES[client] <= end][:4]
        assert [one.client for one in plan.arrived] == kept
        last = TIMES[kept[-1]]
        full = len(kept) == 4 or end > seconds
        assert plan.metrics == {"time/simulated_s": last if full else seconds, "client/late": 6 - len(kept)}


def test_late_uploads_belong_to_the_next_round():
    """Two of two clients take part: the second is always late by a round."""
    plans = planned(Deadline(2.0, late="next_round"), [1.0, 3.0], 2, 3)
    assert [plan.versions for plan in plans] == [{0: 0}, {0: 1, 1: 0}, {0: 2}]
    assert [plan.metrics for plan in plans] == [
        {"time/simulated_s": 2.0, "client/staleness": 0.0},
        {"time/simulated_s": 1.0, "client/staleness": 0.5},
        {"time/simulated_s": 2.0, "client/staleness": 0.0},
    ]


def test_the_number_of_clients_that_are_asked_is_rounded_up():
    (plan,) = planned(Deadline(0.1, 1.3), TIMES, 3, 1, min_clients=3)
    assert plan.metrics["client/late"] == 1  # of ceil(3.9) = 4


def test_clients_that_are_still_at_work_count_as_asked():
    """Four clients are asked in round 1. Two are late, so only two more are asked in round 2."""
    policy = schedule(Deadline(2.0, late="next_round"), [1.0, 1.5, 90.0, 90.0, 1.0, 1.0, 1.0, 1.0])
    policy.sample = lambda round, size: [0, 1, 2, 3]
    first, second = policy.plan(1, 4), policy.plan(2, 4)
    assert first.versions == {0: 0, 1: 0}
    assert len(second.versions) == 2


def test_a_round_in_which_nothing_arrives_has_no_staleness():
    plans = planned(Deadline(1.0, late="next_round"), [2.5, 2.5], 2, 3, min_clients=0)
    assert [plan.versions for plan in plans] == [{}, {}, {0: 0, 1: 0}]
    assert [plan.metrics.get("client/staleness") for plan in plans] == [None, None, 2.0]


def events_by_hand(times, size, concurrency, rounds):
    """Return the clients and versions of each round and its end, by an event loop with a list of (end, client)."""
    now, at_work, result, waiting = 0.0, [], [], []
    for round in range(1, rounds + 1):
        arrived = []
        while len(arrived) < size:
            taken = {client for _, client, _ in at_work + waiting} | {client for client, _ in arrived}
            free = [client for client in range(len(times)) if client not in taken]
            number = min(concurrency - len(at_work) - len(waiting), len(free))
            if number > 0:
                rng = generator(0, Stream.REPLACEMENTS, round, len(arrived))
                chosen = (
                    rng.choice(np.array(free), number, replace=False).tolist()
                    if taken
                    else draw(len(times))(round, number)
                )
                at_work += [(now + times[client], client, round - 1) for client in chosen]
            if not waiting:
                now = min(at_work)[0]
                waiting = sorted(one for one in at_work if one[0] == now)
                at_work = [one for one in at_work if one[0] != now]
            while waiting and len(arrived) < size:
                _, client, version = waiting.pop(0)
                arrived.append((client, version))
        result.append((arrived, now))
    return result


@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 7.0]), min_size=4, max_size=9), st.integers(1, 4), st.integers(1, 9))
def test_asynchronous_rounds_equal_an_event_loop(times, size, concurrency):
    plans = planned(Buffered(concurrency), times, size, 6)
    began = 0.0
    for plan, (arrived, end) in zip(plans, events_by_hand(times, size, concurrency, 6), strict=True):
        assert [(one.client, one.version) for one in plan.arrived] == arrived
        assert plan.metrics["time/simulated_s"] == pytest.approx(end - began)
        began = end


def test_a_fast_client_trains_several_times_while_a_slow_one_trains_once():
    plans = planned(Buffered(2), [1.0, 10.0], 1, 12)
    assert [plan.versions for plan in plans[:9]] == [{0: round} for round in range(9)]
    assert {1: 0} in [plan.versions for plan in plans[9:]]
    assert max(plan.metrics["client/staleness"] for plan in plans) >= 9


@pytest.mark.parametrize("policy", [Buffered(3), Deadline(2.0, 1.5, "next_round"), Deadline(2.0), Synchronous()])
def test_a_resumed_run_plans_the_same_rounds(policy):
    plans = planned(policy, TIMES, 2, 7)
    again = schedule(policy, TIMES)
    for round in (7, 7, 3, 4, 7, 1):
        assert again.plan(round, 2) == plans[round - 1]


class PerStep(Clock):
    """Each client needs a time for each step, and one for its messages."""

    def __init__(self, per_step, messages):
        self.per_step, self.messages = per_step, messages

    def seconds(self, client, work, round):
        return self.messages[client] + work.steps * self.per_step[client]


@given(
    st.lists(st.sampled_from([0.25, 0.5, 1.5, 8.0]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 1.0, 6.0]), min_size=4, max_size=4),
    st.sampled_from([1.0, 5.0, 40.0]),
)
def test_partial_work_is_as_many_steps_as_fit(per_step, messages, seconds):
    work = [ClientWork(steps, 0, 0) for steps in (1, 3, 10, 20)]
    clock = PerStep(per_step, messages)
    schedule = Schedule(Deadline(seconds, late="partial"), clock, draw(4), work, 0, min_clients=0)
    plan = schedule.plan(1, 4)
    fitting = {
        client: max(
            (n for n in range(1, each.steps + 1) if messages[client] + n * per_step[client] <= seconds), default=0
        )
        for client, each in enumerate(work)
    }
    assert list(plan.versions) == [client for client, steps in fitting.items() if steps]
    assert plan.steps == {client: n for client, n in fitting.items() if 0 < n < work[client].steps}
    assert plan.metrics["client/partial"] == len(plan.steps)
    assert plan.metrics["client/late"] == 4 - len(plan.versions)
    whole = all(fitting[client] == each.steps for client, each in enumerate(work))
    ends = [messages[client] + n * per_step[client] for client, n in fitting.items() if n]
    assert plan.metrics["time/simulated_s"] == (max(ends) if whole or len(ends) == 4 else seconds)


def tiers_by_hand(times, tiers, size, rounds):
    """Return the clients and versions of each round and its end, by a loop over (end of the tier, tier, clients)."""
    order = sorted(range(len(times)), key=lambda client: times[client])
    members = [[] for _ in range(tiers)]
    for rank, client in enumerate(order):
        members[rank * tiers // len(order)].append(client)
    now, at_work, result = 0.0, [], []
    for round in range(1, rounds + 1):
        for tier in range(tiers):
            if all(tier != one[1] for one in at_work):
                pool = sorted(members[tier])
                rng = generator(0, Stream.REPLACEMENTS, round, tier)
                chosen = rng.choice(np.array(pool), min(size, len(pool)), replace=False).tolist()
                at_work.append((now + max(times[client] for client in chosen), tier, chosen, round - 1))
        now, *rest = first = min(at_work, key=lambda one: (one[0], max((times[c], c) for c in one[2])))
        at_work.remove(first)
        result.append((dict.fromkeys(sorted(rest[1]), rest[2]), now, rest[0]))
    return result


@given(st.permutations([1.0, 1.25, 2.0, 3.5, 5.75, 9.0, 30.0]), st.integers(2, 4), st.integers(1, 3))
def test_tiers_equal_a_loop(times, tiers, size):
    plans = planned(Tiers(tiers), times, size, 12)
    began = 0.0
    for plan, (versions, end, tier) in zip(plans, tiers_by_hand(times, tiers, size, 12), strict=True):
        assert (plan.versions, plan.tier) == (versions, tier)
        assert plan.metrics["time/simulated_s"] == pytest.approx(end - began)
        began = end


def test_a_single_tier_is_synchronous():
    one, plain = planned(Tiers(1), TIMES, 3, 4), planned(Synchronous(), TIMES, 3, 4)
    assert [plan.versions for plan in one] == [plan.versions for plan in plain]
    assert [plan.metrics["time/simulated_s"] for plan in one] == [plan.metrics["time/simulated_s"] for plan in plain]


def by_day(policy, times, begin, length, **options):
    plans = schedule(policy, times, **options)
    plans.clock.hours = Hours(np.array(begin) * 3600.0, np.array(length) * 3600.0)
    return plans


def test_clients_that_are_offline_are_not_asked():
    """Clients 0 and 1 are online at night, the others by day. Each round takes 6 hours."""
    plans = by_day(Synchronous(), [6 * 3600.0] * 4, [0, 0, 12, 12], [12.0] * 4)
    assert [list(plans.plan(round, 3).versions) for round in range(1, 6)] == [[0, 1], [0, 1], [2, 3], [2, 3], [0, 1]]


def test_the_server_waits_until_enough_clients_are_online():
    plans = by_day(Synchronous(), [60.0] * 3, [6, 7, 9], [3.0, 8.0, 2.0], min_clients=2)
    assert list(plans.plan(1, 3).versions) == [0, 1]
    assert plans.now == 7 * 3600 + 60
    never = by_day(Synchronous(), [60.0] * 2, [6, 9], [1.0, 1.0], min_clients=2)
    assert list(never.plan(1, 2).versions) == [1]  # the run then ends with an error: two are never online together


def test_while_a_client_is_at_work_the_server_does_not_wait_for_others():
    """Client 0 needs half an hour and is online for one, client 1 needs five hours."""
    plans = by_day(Buffered(2), [1800.0, 5 * 3600.0], [0, 0], [1.0, 24.0])
    assert [plans.plan(round, 1).versions for round in (1, 2, 3)] == [{0: 0}, {0: 1}, {1: 0}]
    assert (plans.now, plans.running) == (5 * 3600, [])


def test_a_client_pauses_while_it_is_offline():
    """It needs 7 hours, is online for 3 hours a day, and is asked after the first of them."""
    hours = Hours(np.array([3600.0]), np.array([3 * 3600.0]))
    assert hours.end(0, 2 * 3600.0, 7 * 3600.0) == 2 * DAY + 3600 + 2 * 3600  # 2 hours, 3 hours, 2 hours
    assert hours.end(0, 2 * 3600.0, 2 * 3600.0) == 4 * 3600
    assert Hours(np.array([0.0]), np.array([DAY])).end(0, 5.0, 3 * DAY) == 5 + 3 * DAY


@given(st.floats(0, DAY), st.floats(1, DAY - 1), st.floats(0, 3000 * DAY))
@example(31858.742865817254, DAY / 4, 1012570.787854634)  # the rounded sum is a rounding error before the hour
def test_after_the_wait_a_client_is_online(begin, length, time):
    hours = Hours(np.array([begin]), np.array([length]))
    wait = hours.wait(0, time)
    assert 0 <= wait <= DAY
    assert hours.wait(0, time + wait) == 0


@pytest.mark.parametrize("policy", [Buffered(3), Tiers(2), Deadline(9000.0, late="partial"), Synchronous()])
def test_a_resumed_run_plans_the_same_rounds_of_a_day(policy):
    hours = [1.0, 5.0, 9.0, 13.0, 17.0], [8.0] * 5
    plans = by_day(policy, [4000.0, 8000.0, 1.0, 9500.0, 20000.0], *hours)
    found = [plans.plan(round, 2) for round in range(1, 9)]
    assert all(plan.versions for plan in found)
    again = by_day(policy, [4000.0, 8000.0, 1.0, 9500.0, 20000.0], *hours)
    for round in (8, 8, 2, 3, 8, 1):
        assert again.plan(round, 2) == found[round - 1]


def test_options_out_of_range_are_refused():
    for name, value in {"seconds": 0, "over_sample": 0.9}.items():
        with pytest.raises(ConfigError, match=rf"^round_policy\.{name}: "):
            Deadline(**{name: value})
    with pytest.raises(ConfigError, match=r"^round_policy\.concurrency: "):
        Buffered(0)
    with pytest.raises(ConfigError, match=r"^round_policy\.tiers: "):
        Tiers(0)
    with pytest.raises(ConfigError, match=r"^round_policy\.late: "):
        Deadline(late="partial")
