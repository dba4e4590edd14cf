"""Descriptions, usages and examples of the commands, which ``--help`` shows around the options.

Lines have at most 78 columns, or 76 in a group of options, which is indented.
"""

ABOUT = """\
Collect exactly N true transitions from reinforcement-learning environments
into a replay storage, show the content of a storage, and check that it is as
it was written.
"""
EXAMPLES = """\
examples:
  a million transitions of CartPole, from 8 lanes, into runs/pole:
    tallyroll collect CartPole-v1 --frames 1e6 --num-envs 8 --out runs/pole
  show its content, and check it:
    tallyroll inspect runs/pole
    tallyroll verify runs/pole
  continue after Ctrl-C or a kill; the run ends at exactly a million:
    tallyroll collect --resume --out runs/pole

`tallyroll COMMAND --help` describes the options of a command; `tallyroll envs`
lists the environment systems that can be collected from.
"""

COLLECT_USAGE = """\
%(prog)s ENV --out PATH (--frames N | --episodes E) [options]
       %(prog)s --resume --out PATH [options]"""
COLLECT = """\
Collect exactly N transitions (--frames), or exactly E whole episodes
(--episodes), into a new storage. Actions are random unless --policy names a
policy. A transition is one action that an environment executed. Rows are
committed batch by batch, and committed rows survive kill -9.
"""
COLLECT_THERE = """\
examples: append a second run; continue a run that was stopped or killed
  tallyroll collect CartPole-v1 --frames 50_000 --out runs/pole --append
  tallyroll collect --out runs/pole --resume
"""
COLLECT_SOURCE = """\
examples: `policy` in my_agent.py of the current directory; an environment
registered by a module of yours, with arguments for its constructor; another
environment system, SYSTEM:ID (`tallyroll envs` lists them)
  tallyroll collect Pendulum-v1 --episodes 9 --policy my_agent:policy --out a
  tallyroll collect my:Maze-v0 --env-kwargs '{"size": 9}' --frames 5e3 --out b
  tallyroll collect envpool:CartPole-v1 --frames 1e6 --num-envs 64 --out c
"""
COLLECT_SHARDS = """\
example: one job of 8, to be started again by the same command; in an array
its number is $SLURM_ARRAY_TASK_ID, or $JOB_COMPLETION_INDEX, in place of 3
  tallyroll collect CartPole-v1 --frames 1e6 --num-envs 64 --seed 0 --resume \\
    --shard 3/8 --out runs/part-3
"""
COLLECT_WORKERS = """\
example: costly steps, in 4 processes (the data are those of one process)
  tallyroll collect Ant-v5 --frames 1e6 --num-envs 32 --workers 4 --out ant
"""
COLLECT_STORAGE = """\
examples: one HDF5 file, or one Zarr group, for other programs to read
  tallyroll collect CartPole-v1 --frames 50_000 --out pole.h5 --finalize
  tallyroll collect CartPole-v1 --frames 50_000 --out pole.zarr --finalize
"""
COLLECT_LOGS = """\
example: a row every 5,000 transitions, for a table and for TensorBoard
  tallyroll collect CartPole-v1 --frames 1e6 --out runs/pole --log-every 5e3 \\
    --log runs/pole.csv --log tensorboard:runs/curves
"""
COLLECT_CHECKPOINTS = """\
example: a job that a scheduler ends, and starts again by the same command
  tallyroll collect CartPole-v1 --frames 1e6 --out runs/pole --resume \\
    --checkpoint runs/saved --checkpoint-every 5e4 --checkpoint-on SIGUSR1
"""
COLLECT_EXAMPLES = """\
examples:
  random actions, 8 environments side by side:
    tallyroll collect CartPole-v1 --frames 1e6 --num-envs 8 --out runs/pole
  exactly 100 whole episodes, the same ones each time:
    tallyroll collect CartPole-v1 --episodes 100 --seed 0 --out runs/seeded
  the execution plan, and why faster paths are off:
    tallyroll collect CartPole-v1 --frames 1e4 --plan --out runs/plan

On Ctrl-C and SIGTERM the command commits all complete transitions, prints how
to resume, and exits with status 130 and 143. A run that does not fit on the
disk is refused before it begins.
"""

COMPLETION_USAGE = "%(prog)s {bash,zsh,tcsh} [options]"
COMPLETION = """\
Print a script that lets a shell complete commands, options and their values
by Tab. It is made once, from the options of this version; nothing of Tallyroll
runs while a shell completes. Needs the extra: pip install
'tallyroll[completion]'.
"""
COMPLETION_EXAMPLES = """\
examples (new shells complete):
  tallyroll completion bash \\
    > ~/.local/share/bash-completion/completions/tallyroll
  tallyroll completion zsh > ~/.zfunc/_tallyroll      # a folder of $fpath
  tallyroll completion tcsh > ~/.tallyroll.tcsh       # source it in ~/.tcshrc
"""

ENVS_USAGE = "%(prog)s [SYSTEM ...] [options]"
ENVS = """\
List the environment systems, from which `tallyroll collect SYSTEM:ID`
collects: which of them are installed, what installs the others, what cannot be
installed together, how episodes end and where seeds are taken. Nothing of them
is imported. Packages can add systems of their own.
"""
ENVS_EXAMPLES = """\
examples:
  tallyroll envs
  tallyroll envs brax && tallyroll collect brax:ant --frames 1e6 --out ant
  tallyroll envs --json | jq -r '.[] | select(.installed) | .name'

exit status:
  0  listed; those that were named are installed
  1  one that was named is not installed, or there is none of that name
"""

DIFF_USAGE = "%(prog)s PATH OTHER [options]"
DIFF = """\
Compare two storages, of any formats, by trajectory and step: which rows are in
one of them alone, and in which rows which columns have other bits. What made
them is compared too, and does not decide. Another process may write meanwhile.
"""
DIFF_EXAMPLES = """\
examples:
  tallyroll diff runs/pole runs/pole.h5
  tallyroll diff runs/all runs/copy --ids relative
  tallyroll diff runs/a runs/b --json | jq .places

exit status:
  0  both have the same columns and rows
  1  they differ
  2  they could not be compared: no storage, not readable, or a wrong argument
"""

INFO_USAGE = "%(prog)s [options]"
INFO = """\
Show the versions of Tallyroll and of what it stands on, whether the extension
in C was built and loads, the environment systems that can be imported, the
devices, and the limits of this machine: for reports of bugs. Each package is
imported in a process apart, so that one that is broken is shown with its
error. Folders of yours are not shown.
"""
INFO_EXAMPLES = """\
examples:
  tallyroll info
  tallyroll info --json | jq .extension
"""

INSPECT_USAGE = "%(prog)s PATH [PATH ...] [options]"
INSPECT = """\
Show a storage: its columns, its runs, how many rows and trajectories it holds,
returns and lengths of the episodes that ended (in all, by run, and by the
policy's version at the last action), and its first rows. Another process may
write meanwhile. Of several storages, all of them as one: which rows are whose,
and of the shards of a run, which are missing, doubled or foreign.
"""
INSPECT_EXAMPLES = """\
examples:
  tallyroll inspect runs/pole
  tallyroll inspect runs/pole --rows 20
  tallyroll inspect runs/pole --runs
  tallyroll inspect runs/pole --trajectories | tail
  tallyroll inspect runs/pole --json | jq .returns.mean
  tallyroll inspect runs/shard-* --json | jq .shards.complete
"""

REPLAY_USAGE = "%(prog)s PATH [PATH ...] [options]"
REPLAY = """\
Start stored trajectories again, from the seeds and contexts that their rows
have, or else from the run's seed through all that their lanes did; step the
stored actions, and compare every observation, reward and end bit for bit. It is
promised for the same machine and versions; those that differ are named. Copied
and packed rows are replayed by the runs that made them.
"""
REPLAY_EXAMPLES = """\
examples:
  tallyroll replay runs/pole
  tallyroll replay runs/pole --trajectory 7
  tallyroll replay runs/pole --all --json | jq .first_difference
  tallyroll replay runs/shard-*
  tallyroll replay runs/pole --env-factory my_envs:make_pole
  tallyroll replay runs/pong --trajectory 7 --render pong.mp4

exit status:
  0  equal
  1  something differs: the first difference is shown
  2  something could not be replayed (and nothing differs), or a wrong argument
"""

REPORT_USAGE = "%(prog)s PATH [PATH ...] [options]"
REPORT = """\
Report over the runs of many storages: transitions that were asked for and
stored, ledgers, returns with intervals over seeds, learning curves, and what
differs between the runs. Runs of one environment and one label are a group,
and are its seeds; runs/ppo-3 and runs/ppo/3 have the label ppo. Folders are
looked through. Needs the extra: pip install 'tallyroll[report]'.
"""
REPORT_EXAMPLES = """\
examples:
  a table, and one page with learning curves that needs no network:
    tallyroll report runs/* --html report.html
  what a batch size changes:
    tallyroll report runs --group-by environment,call.frames_per_batch
  several environments together, with returns scaled to 0 and 1:
    tallyroll report runs --group-by label --scale CartPole-v1=0:500 \\
      --scale Pendulum-v1=-1500:-150
  for other programs:
    tallyroll report runs/* --csv > runs.csv
    tallyroll report runs/* --json | jq '.groups[].interquartile_mean'

exit status:
  0  all is in the numbers
  1  something could not be read, or is not in them; the rest is reported
  2  a wrong argument
"""

VERIFY_USAGE = "%(prog)s PATH [PATH ...] [options]\n       %(prog)s [KIND:]PATH [options]"
VERIFY = """\
Read every row of a storage, and report rows that are inconsistent: counts that
do not match, ids and steps with gaps or repeats, rows after an end, next
observations that differ from the following row's observation, lost final
observations, NaN, rows that were never written, a ledger that does not
balance, bytes that changed since the storage was finalized. Each finding names
its row. Another process may write meanwhile. Of several storages, each is
checked, that no two have the same rows, and that no shard of a run is missing.

A dataset of another library is checked alike, one at a time: counts against its
metadata, episodes and their borders, indices, timestamps, next observations,
ends, NaN, spaces, frames of films against rows, statistics against data, files
that are missing. KIND is d4rl, hf, lerobot, minari, npz, parquet, rlds or
torchrl; it can be left out where the files say it. Nothing in it is unpickled
or executed.
"""
VERIFY_EXAMPLES = """\
examples:
  tallyroll verify runs/pole
  tallyroll verify runs/pole.h5 --skip nan,zeros
  tallyroll verify runs/pole --json | jq .findings
  tallyroll verify runs/shard-*
  tallyroll verify minari:datasets/pole-v0
  tallyroll verify lerobot:datasets/pusht --skip videos

exit status:
  0  sound
  1  something is wrong with the storage, or the dataset
  2  it could not be checked: no storage, not readable, or a wrong argument
"""
