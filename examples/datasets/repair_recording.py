"""Recover a recording whose recorder was killed.

    python examples/datasets/repair_recording.py

A child process records CartPole in an HDF5 file. Like many scripts, it flushes after each episode.
It is killed with SIGKILL in the middle of an episode. `repair` writes the readable rows to a new
storage, and lists what was lost. The script needs h5py: pip install "tallyroll[hdf5]"
"""

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from tallyroll.storage import open_storage, repair, verify

RECORDER = """
import sys, gymnasium, h5py

path, env_id, seed, chunk = sys.argv[1:]
env = gymnasium.make(env_id)
env.action_space.seed(int(seed))
width = env.observation_space.shape
with h5py.File(path, "w", libver="latest") as file:
    shapes = {"observations": width, "next_observations": width, "actions": (), "rewards": (),
              "terminals": (), "timeouts": ()}
    data = {name: file.create_dataset(name, (0, *shape), "f4", maxshape=(None, *shape),
                                      chunks=(int(chunk), *shape))
            for name, shape in shapes.items()}
    file.flush()
    for episode in range(1_000_000):
        observation, _ = env.reset(seed=int(seed) + episode)
        ended = False
        while not ended:
            action = env.action_space.sample()
            after, reward, terminated, truncated, _ = env.step(action)
            row = {"observations": observation, "next_observations": after, "actions": action,
                   "rewards": reward, "terminals": terminated, "timeouts": truncated}
            for name, value in row.items():
                data[name].resize(len(data[name]) + 1, 0)
                data[name][-1] = value
            observation, ended = after, terminated or truncated
        file.flush()
        print(len(data["rewards"]), flush=True)
"""


@dataclass
class Args:
    """Arguments of the script."""

    out: str = field(default="data/recording", metadata={"help": "a folder that is not there"})
    env_id: str = field(
        default="CartPole-v1", metadata={"help": "of Gymnasium, with discrete actions"}
    )
    rows: int = field(default=2000, metadata={"help": "rows that are flushed before the kill"})
    chunk: int = field(default=64, metadata={"help": "rows a chunk of the file"})
    seed: int = field(default=0, metadata={"help": "of the environment and its actions"})


def parse() -> Args:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for each in fields(Args):
        name, kind = each.name.replace("_", "-"), type(each.default)
        text = f"{each.metadata['help']} (default: {each.default})"
        parser.add_argument(f"--{name}", type=kind, default=each.default, help=text)
    return Args(**vars(parser.parse_args()))


def main(args: Args) -> None:
    """Record, kill, repair, verify."""
    folder = Path(args.out)
    folder.mkdir(parents=True)
    recording = folder / "recording.hdf5"
    words = [str(recording), args.env_id, str(args.seed), str(args.chunk)]
    command = [sys.executable, "-c", RECORDER, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None
        flushed = 0
        for line in recorder.stdout:
            flushed = int(line)
            if flushed >= args.rows:
                time.sleep(0.01)  # the recorder is now in the middle of another episode
                recorder.send_signal(signal.SIGKILL)
                break
    print(f"killed after {flushed} rows were flushed")
    report = repair(recording, folder / "saved", "d4rl")
    print(f"{report.rows} rows saved, at least as many as were flushed: {report.rows >= flushed}")
    for loss in report.lost:
        print(f"lost: {loss}")
    print(f"sound: {verify(folder / 'saved').sound}")
    with open_storage(folder / "saved") as storage:
        print(f"{len(storage.trajectories)} trajectories")


if __name__ == "__main__":
    main(parse())
