"""What a program's end, Ctrl-C and a fork do to a batcher, and that it sleeps meanwhile."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from batchery import BatcherClosed, batched
from support.gate import batcher_threads
from support.harness import START_S, wait_for

ENDS = """
import time
from batchery import batched

@batched(max_batch_size=8, max_wait_ms=3_600_000)
def slow(numbers):
    time.sleep(0.05)
    return numbers

for number in range(20):
    slow.submit(number).add_done_callback(lambda future: print(future.result(), flush=True))
"""

ENGINE = """
import threading
from batchery import Engine, ModelSettings

engine = Engine(ModelSettings(kind="embedding", model={model!r}, cpu_streams=2), device="cpu")
engine.call("a")  # transformers loads no model while the program ends
texts = ["the cat sat on the mat " * count for count in (30, 40)] * 20

def call():
    threading.main_thread().join()
    print(len(engine.call(texts)), flush=True)

threading.Thread(target=call).start()
engine.submit_many(texts).add_done_callback(lambda future: print(len(future.result()), flush=True))
"""

HANGS = """
import os
import signal
import sys
import threading
import time
from batchery import batched

# A shell starts what runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

@batched(max_batch_size=1)
def slow(numbers):
    registered.wait()
    print("begun", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    return numbers

registered = threading.Event()
slow.submit("runs").add_done_callback(lambda future: print(future.result(), flush=True))
try:
    registered.set()
    slow("never")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


def run(program: str) -> list[str]:
    """Runs a program to its end; returns the lines that it printed."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_waits_is_answered_when_the_program_ends() -> None:
    assert run(ENDS) == list(map(str, range(20)))


def test_engine_answers_what_waits_when_the_program_ends(minilm_path: Path) -> None:
    assert run(ENGINE.format(model=str(minilm_path))) == ["40", "40"]


def test_ctrl_c_ends_the_wait_and_drops_the_call(tmp_path: Path) -> None:
    said, gate = tmp_path / "said", tmp_path / "gate"
    with said.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", HANGS, str(gate)], stdout=out, stderr=out)
    try:
        wait_for(lambda: "begun" in said.read_text(), "the first batch runs", START_S)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "interrupted" in said.read_text(), "the wait has ended", START_S)
        gate.touch()
        assert process.wait(START_S) == -signal.SIGINT
    finally:
        process.kill()
    lines = said.read_text().splitlines()
    assert lines.count("begun") == 1
    assert "runs" in lines
    assert lines[-1] == "runs" or "KeyboardInterrupt" in lines


def test_a_forked_process_is_told() -> None:
    used, unused = batched(lambda items: items), batched(lambda items: items)
    assert used("a") == "a"
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            used("a")
        except BatcherClosed as error:
            os.write(writer, f"{error} {unused('b')}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        text = said.read()
    assert (status, text.endswith("make it after the fork b")) == (0, True), text
    assert used("a") == "a"


def test_nothing_wakes_up_while_nothing_is_called() -> None:
    before_it = set(batcher_threads())
    function = batched(lambda items: items)
    assert function("a") == "a"
    (thread,) = set(batcher_threads()) - before_it
    switches = f"/proc/self/task/{thread.native_id}/status"

    def count() -> list[str]:
        with open(switches) as status:
            return [line for line in status if "ctxt_switches" in line]

    def is_asleep() -> bool:
        before = count()
        time.sleep(1)  # What must not happen takes a while not to happen.
        return count() == before

    # On a busy machine it may take a while until it sleeps.
    wait_for(is_asleep, "it sleeps")
