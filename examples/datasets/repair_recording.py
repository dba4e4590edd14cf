"""Save a recording whose recorder was killed.

    python examples/datasets/repair_recording.py --out data/recording

A child process records CartPole in an HDF5 file, as many scripts do: it flushes after each episode.
It is killed with SIGKILL in the middle. `repair` writes what is readable to a new storage, and
lists what was lost. Needs h5py: pip install 'tallyroll[hdf5]'
"""

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tallyroll.storage import open_storage, repair, verify

RECORDER = """
import sys, gymnasium, h5py

env = gymnasium.make("CartPole-v1")
with h5py.File(sys.argv[1], "w", libver="latest") as file:
    shapes = {"observations": (4,), "next_observations": (4,), "actions": (), "rewards": (),
              "terminals": (), "timeouts": ()}
    data = {name: file.create_dataset(name, (0, *shape), "f4", maxshape=(None, *shape),
                                      chunks=(64, *shape)) for name, shape in shapes.items()}
    file.flush()
    for episode in range(1_000_000):
        observation, _ = env.reset(seed=episode)
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

    out: str = "data/recording"
    rows: int = 2000


def main(args: Args) -> None:
    """Record, kill, repair, verify."""
    folder = Path(args.out)
    folder.mkdir(parents=True)
    recording = folder / "recording.hdf5"
    command = [sys.executable, "-c", RECORDER, str(recording)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None
        flushed = 0
        for line in recorder.stdout:
            flushed = int(line)
            if flushed >= args.rows:
                time.sleep(0.01)  # it is in the middle of another episode
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    text = f"folder of the recording, and of what is saved (default: {Args.out})"
    parser.add_argument("--out", default=Args.out, help=text)
    text = f"kill the recorder after so many rows (default: {Args.rows})"
    parser.add_argument("--rows", type=int, default=Args.rows, help=text)
    main(Args(**vars(parser.parse_args())))
