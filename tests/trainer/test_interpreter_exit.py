"""What a training prints last, when it ends while an iterator over its loader is alive: its own error, or nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hook_daemon import HookDaemon

# Each training is a fork of this program, which imports torch once, and ends as a program does.
PROGRAM = """
import json, os, signal, sys, torch, trainer_hook
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    samples = [(f"{i}.png", 0) for i in range(64)]
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(1)

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = torch.nn.Linear(1, 1)

def wait_for_all(mount, cases):
    found = {}
    for number, (way, workers, end) in enumerate(cases):
        child = os.fork()
        if not child:
            os.dup2(os.open(f"{mount}/{number}", os.O_CREAT | os.O_WRONLY), 2)
            return way, workers, end
        found[number] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(found), flush=True)
    os._exit(0)

mount = sys.argv[1]
way, workers, end = wait_for_all(mount, json.loads(sys.argv[2]))
options = {"num_workers": 2, "multiprocessing_context": "fork"} if workers else {}
loader = DataLoader(Files(), 8, shuffle=True, **options)
if way == "accelerate":
    loader = Accelerator(cpu=True).prepare(loader)
if way == "attach":
    hook = trainer_hook.attach(mount, Network(), loader)
else:
    planning = trainer_hook.plan(mount, loader)
if way == "skip":
    loader = Accelerator(cpu=True).skip_first_batches(loader, 2)
batches = iter(loader)
next(batches)
signal.signal(signal.SIGINT, signal.default_int_handler)
if end == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
elif end == "error":
    raise ValueError("the training's own error")
elif end == "exit":
    sys.exit("given up")
"""
LAST = {
    "plain": (0, ""),
    "error": (1, "ValueError: the training's own error"),
    "exit": (1, "given up"),
    "interrupt": (-signal.SIGINT, "KeyboardInterrupt"),
}
# With workers, torch's own end of an iterator that is alive takes a second or more.
CASES = [
    *(("plan", False, end) for end in LAST),
    *(("attach", False, end) for end in ("plain", "interrupt")),
    *(("accelerate", False, end) for end in ("plain", "error")),
    *(("skip", False, end) for end in ("plain", "exit")),
    ("plan", True, "plain"),
    ("attach", True, "interrupt"),
]
Ended = list[tuple[int, str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit status of each training, and what it wrote to stderr."""
    directory = tmp_path_factory.mktemp("exit")
    with HookDaemon(directory):
        program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(directory), json.dumps(CASES)]
        told = subprocess.run(
            program, stdout=subprocess.PIPE, check=True, timeout=300, cwd=Path(__file__).parents[2]
        ).stdout
    return [(status, (directory / number).read_text()) for number, status in json.loads(told).items()]


@pytest.mark.parametrize("case", CASES)
def test_the_last_line_is_the_trainings_own(ended: Ended, case: tuple[str, bool, str]) -> None:
    status, text = ended[CASES.index(case)]
    assert (status, (text.splitlines() or [""])[-1]) == LAST[case[2]], text
    assert "Exception ignored" not in text
    assert "trainer_hook" not in text
