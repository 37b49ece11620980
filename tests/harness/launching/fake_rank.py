"""A rank without training: the command line and files of `harness.training.worker`, behaviour from its cell.

Options of the cell's workload: `steps`, `step_seconds`, and `act` (crash, lost_peer, oom, hang, kill, term,
exit, orphan), done by rank `at_rank` at step `at_step`, right after rank `also_rank` ended by `also_act`;
`once` restricts it to the first attempt. Every rank writes its CPUs and its environment in
`used-<rank>.json`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.runs.heartbeat import HeartbeatWriter

ERRORS = {
    "crash": ("ValueError", "damping went away\nsecond line"),
    "lost_peer": ("RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:1"),
    "oom": ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("rank", "world-size", "local-rank", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    options = json.loads((args.folder.parent / "cell.json").read_text())["workload"]["options"]
    first = args.folder.name == "attempt-1"
    mine = args.rank in (options.get("at_rank", 0), options.get("also_rank"))
    act = options.get("act") if mine and (first or not options.get("once")) else None
    train(args, options, act)


def train(args, options, act):
    used = {"cpus": sorted(os.sched_getaffinity(0)), "from": time.time(), "threads": args.threads}
    used["environment"] = dict(os.environ)
    heartbeat = HeartbeatWriter(args.folder / f"rank-{args.rank:05}.heartbeat")
    steps = int(options.get("steps", 3))
    heartbeat.total_steps = steps
    if act == "late_kill":  # somebody else's SIGKILL, which the launcher sees only after its own SIGTERM
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for step in range(steps):
        heartbeat.step = step
        heartbeat.write("backward")
        if act and step == options.get("at_step", 1):
            if args.rank == options.get("also_rank"):
                act = options["also_act"]
                wait_for(args.folder / "at-step")
                (args.folder / "also-pid").write_text(str(os.getpid()))
            elif "also_rank" in options:
                (args.folder / "at-step").touch()
                wait_for(args.folder / "also-pid")
                wait_until_gone(int((args.folder / "also-pid").read_text()))
            misbehave(args, act, step)
        time.sleep(float(options.get("step_seconds", 0.02)))
    used["to"] = time.time()
    (args.folder / f"used-{args.rank}.json").write_text(json.dumps(used))
    if args.rank == 0 and options.get("result", True):
        reached = bool(options.get("reached", True))
        result = {"reached_target": reached, "stop_reason": "target" if reached else "epochs"}
        result |= {"train_seconds": 1.0, "value": 0.95, "steps": steps, "parameters_sha256": "0" * 64}
        (args.folder / "result.json").write_text(json.dumps(result))


def wait_for(path):
    while not path.exists() or (path.name == "also-pid" and not path.read_text()):
        time.sleep(0.002)


def wait_until_gone(pid):
    """Until the launcher has seen this process end."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.002)


def misbehave(args, act, step):
    if act in ERRORS:
        error, message = ERRORS[act]
        record = {"schema": 1, "kind": "failure", "rank": args.rank, "step": step, "phase": "backward"}
        record |= {"error": error, "message": message, "traceback": ""}
        with (args.folder / f"rank-{args.rank:05}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        sys.exit(1)
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "term":  # as a scheduler does to it, and before its wrapper has noticed
        os.kill(os.getpid(), signal.SIGTERM)
    if act == "exit":
        print("cannot find the data set")
        sys.exit(3)
    if act == "orphan":
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        for name, session in (("in-group", False), ("own-session", True)):
            child = subprocess.Popen(sleeper, start_new_session=session)
            (args.folder / f"grandchild-{name}").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "late_kill":
        time.sleep(600)
    if act == "hang":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)


if __name__ == "__main__":
    main()
