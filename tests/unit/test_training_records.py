"""The record of a continued run equals an uninterrupted one's; a stop request waits for the step's end."""

from __future__ import annotations

import json
import os
import signal

import pytest

from nemo_qad.training.interrupt import deferred_stop
from nemo_qad.training.metrics import MetricsLog


def _write(folder, first, last, start):
    log = MetricsLog(folder, "qad", start_step=start)
    for step in range(first, last + 1):
        log.write(step, kl=1 / (step + 1))
    log.close()


def test_continued_record_equals_straight_record(tmp_path):
    straight, stopped = tmp_path / "a", tmp_path / "b"
    straight.mkdir(), stopped.mkdir()
    _write(straight, 0, 9, start=0)
    _write(stopped, 0, 6, start=0)
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "qad", "st')  # the line that a killed process was writing
    _write(stopped, 5, 9, start=4)  # continues from the checkpoint of step 4
    assert (stopped / "metrics.jsonl").read_text() == (straight / "metrics.jsonl").read_text()


def test_starting_anew_drops_the_old_record_of_that_stage_only(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "teacher", "step": 3}\n{"stage": "qad", "step": 0}\n')
    _write(tmp_path, 0, 0, start=0)
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert entries == [{"stage": "teacher", "step": 3}, {"stage": "qad", "step": 0, "kl": 1.0}]


@pytest.fixture
def interruptible():
    """SIGINT as Python has it, also where these tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_signal_waits_and_second_stops_at_once(interruptible: None):
    with deferred_stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
