"""Simulated clocks: the times of clients against the formula, and their distribution."""

import math

import numpy as np
import pytest

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.scheduling import ClientWork, DeviceClock, DeviceTrace

WORK = ClientWork(steps=30, down=2_000_000, up=500_000)


def started(clock, clients=5, seed=3):
    clock.start(seed, clients)
    return clock


def test_equal_devices_take_the_time_of_their_steps_and_messages():
    clock = started(DeviceClock(0.2, 0.0, 16.0, 4.0, 0.0, latency=1.5))
    assert [clock.seconds(client, WORK, 1) for client in range(5)] == [30 * 0.2 + 16 / 16 + 4 / 4 + 1.5] * 5


def test_each_client_has_a_factor_on_its_steps_and_one_on_both_links():
    clock = started(DeviceClock(0.2, 0.7, 16.0, 4.0, 0.3))
    for client, (compute, link) in enumerate(generator(3, Stream.DEVICES).standard_normal((5, 2))):
        expected = 6 * math.exp(0.7 * compute) + 2 * math.exp(0.3 * link)
        assert clock.seconds(client, WORK, 1) == pytest.approx(expected, rel=1e-12)
        assert clock.seconds(client, WORK, 9) == clock.seconds(client, WORK, 1)


def test_the_spread_is_the_deviation_of_the_logarithm():
    clock = started(DeviceClock(1.0, 0.8, math.inf, math.inf), clients=20_000)
    logs = np.log([clock.seconds(client, ClientWork(1, 10, 10), 1) for client in range(20_000)])
    assert logs.mean() == pytest.approx(0, abs=5 * 0.8 / 20_000**0.5)
    assert logs.std() == pytest.approx(0.8, rel=0.03)


def test_jitter_changes_the_time_of_a_client_from_round_to_round():
    clock, plain = started(DeviceClock(jitter=0.5)), started(DeviceClock())
    logs = np.log([clock.seconds(2, WORK, round) / plain.seconds(2, WORK, round) for round in range(1, 2001)])
    assert logs.mean() == pytest.approx(0, abs=5 * 0.5 / 2000**0.5)
    assert logs.std() == pytest.approx(0.5, rel=0.1)
    assert clock.seconds(2, WORK, 7) == started(DeviceClock(jitter=0.5)).seconds(2, WORK, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seconds_per_step", -1), ("spread", -0.1), ("download_mbit", 0), ("upload_mbit", 0)),
        *(("link_spread", 11), ("latency", -1), ("jitter", math.nan)),
    ],
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^clock\.{name}: "):
        DeviceClock(**{name: value})


def test_devices_of_a_file_are_drawn_with_replacement(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("seconds_per_step,download_mbit,upload_mbit\n0.1,16,4\n0.2,32,8\n0.4,1,1\n")
    clock = started(DeviceTrace(str(path)), clients=3000)
    times = [clock.seconds(client, WORK, 1) for client in range(3000)]
    expected = [3 + 1 + 1, 6 + 0.5 + 0.5, 12 + 16 + 4]
    shares = [times.count(pytest.approx(time)) / 3000 for time in expected]
    assert sum(shares) == 1
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)


@pytest.mark.parametrize(
    "text",
    [
        *("", "seconds_per_step,download_mbit\n1,2\n", "seconds_per_step,download_mbit,upload_mbit\n"),
        *(f"seconds_per_step,download_mbit,upload_mbit\n1,{value},3\n" for value in ("x", "-1", "0", "nan", "")),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, text):
    path = tmp_path / "devices.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^clock\.path: "):
        started(DeviceTrace(str(path)))
    with pytest.raises(ConfigError, match=r"^clock\.path: "):
        started(DeviceTrace(str(tmp_path / "missing.csv")))


def test_devices_are_online_for_their_share_of_the_day():
    """Seen from outside: counts of the seconds of a day at which `wait` is 0."""
    clock = started(DeviceClock(online_share=0.25), clients=400)
    online = np.array(
        [[clock.hours.wait(client, hour * 3600 + 1.0) == 0 for hour in range(24)] for client in range(400)]
    )
    assert set(online.sum(1)) == {6}
    assert online.mean(0) == pytest.approx(0.25, abs=0.1)  # at each hour
    assert started(DeviceClock()).hours is None


def test_the_hours_are_drawn_apart_from_the_speeds():
    """With the random numbers of the speeds, slow devices would be online at other times of the day than fast ones."""
    begin = started(DeviceClock(online_share=0.25), clients=400).hours.begin / 86400
    drawn = generator(3, Stream.DEVICES).random(400)
    assert abs(np.corrcoef(begin, drawn)[0, 1]) < 0.2


def test_a_pause_lengthens_the_work_of_a_client():
    clock = started(DeviceClock(10.0, 0.0, math.inf, math.inf, online_share=0.5))
    begin = clock.hours.begin[0]
    assert clock.end(0, ClientWork(360, 0, 0), 1, begin) == begin + 3600
    assert clock.end(0, ClientWork(5 * 4320, 0, 0), 1, begin) == begin + 5 * 43200 + 4 * 43200


def test_a_trace_may_have_hours(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("seconds_per_step,download_mbit,upload_mbit,online_from_h,online_h\n0.5,1,1,22,8\n")
    clock = started(DeviceTrace(str(path)))
    assert [clock.hours.wait(0, hour * 3600.0) / 3600 for hour in (21, 22, 29, 30, 45)] == [1, 0, 0, 16, 1]
    for row in ("0.5,1,1,22,0", "0.5,1,1,22,25", "0.5,1,1,nan,8", "0.5,1,1,22"):
        path.write_text(f"seconds_per_step,download_mbit,upload_mbit,online_from_h,online_h\n{row}\n")
        with pytest.raises(ConfigError, match=r"^clock\.path: "):
            started(DeviceTrace(str(path)))
