"""Asking a loop to stop, once and twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from moesaic.train.signals import StopRequest


def test_the_first_signal_is_remembered_and_said():
    said = []
    with StopRequest(said.append) as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
    assert len(said) == 1 and "SIGTERM" in said[0]


def test_a_say_that_cannot_write_does_not_matter():
    def reentrant(text):
        raise RuntimeError("reentrant call")

    with StopRequest(reentrant) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGINT"


def test_the_second_leaves_at_once_even_out_of_a_loop_that_never_looks():
    program = (
        "import os, signal\n"
        "from moesaic.train.signals import StopRequest\n"
        "try:\n"
        "    with StopRequest(print) as stop:\n"
        "        while True:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "finally:\n"
        "    print('cleaned up')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "cleaned up" not in done.stdout and "Traceback" not in done.stderr
