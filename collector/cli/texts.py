"""Descriptions, usages and examples of the commands, which ``--help`` shows around the options.

Lines have at most 78 columns, or 76 in a group of options, which is indented.
"""

ABOUT = """\
Collect exactly N transitions from reinforcement-learning environments into a
replay storage, show the content of a storage, and check that it is intact.
"""
EXAMPLES = """\
examples:
  collect a million transitions of CartPole from 8 lanes into runs/pole:
    tallyroll collect CartPole-v1 --frames 1e6 --num-envs 8 --out runs/pole
  show the storage, and check it:
    tallyroll inspect runs/pole
    tallyroll verify runs/pole
  continue after Ctrl-C or a kill; the run ends at exactly a million:
    tallyroll collect --resume --out runs/pole

`tallyroll COMMAND --help` describes the options of a command, and
`tallyroll --help --all` lists all commands.
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
registered by your own module, with arguments for its constructor; another
environment system, SYSTEM:ID (`tallyroll envs` lists them)
  tallyroll collect Pendulum-v1 --episodes 9 --policy my_agent:policy --out a
  tallyroll collect my:Maze-v0 --env-kwargs '{"size": 9}' --frames 5e3 --out b
  tallyroll collect envpool:CartPole-v1 --frames 1e6 --num-envs 64 --out c
"""
COLLECT_SHARDS = """\
example: one of 8 jobs, restarted with the same command; in a job array, use
$SLURM_ARRAY_TASK_ID or $JOB_COMPLETION_INDEX in place of 3
  tallyroll collect CartPole-v1 --frames 1e6 --num-envs 64 --seed 0 --resume \\
    --shard 3/8 --out runs/part-3
"""
COLLECT_WORKERS = """\
example: run costly steps in 4 processes; the data are the same as with one
  tallyroll collect Ant-v5 --frames 1e6 --num-envs 32 --workers 4 --out ant
"""
COLLECT_STORAGE = """\
examples: one HDF5 file, or one Zarr group, for other programs to read
  tallyroll collect CartPole-v1 --frames 50_000 --out pole.h5 --finalize
  tallyroll collect CartPole-v1 --frames 50_000 --out pole.zarr --finalize
"""
COLLECT_LOGS = """\
example: log every 5,000 transitions to a CSV file and to TensorBoard
  tallyroll collect CartPole-v1 --frames 1e6 --out runs/pole --log-every 5e3 \\
    --log runs/pole.csv --log tensorboard:runs/curves
"""
COLLECT_CHECKPOINTS = """\
example: a job that a scheduler stops and restarts with the same command
  tallyroll collect CartPole-v1 --frames 1e6 --out runs/pole --resume \\
    --checkpoint runs/saved --checkpoint-every 5e4 --checkpoint-on SIGUSR1
"""
COLLECT_EXAMPLES = """\
examples:
  random actions, 8 environments stepped together:
    tallyroll collect CartPole-v1 --frames 1e6 --num-envs 8 --out runs/pole
  exactly 100 complete episodes, the same ones each time:
    tallyroll collect CartPole-v1 --episodes 100 --seed 0 --out runs/seeded
  the execution plan, and why faster paths are off:
    tallyroll collect CartPole-v1 --frames 1e4 --plan --out runs/plan

On Ctrl-C and SIGTERM the command commits all complete transitions, prints how
to resume, and exits with status 130 or 143, respectively. A run that does not
fit on the disk is rejected before it starts.
"""

COMPLETION_USAGE = "%(prog)s {bash,zsh,fish,tcsh} [options]"
COMPLETION = """\
Print a shell script that completes commands, options and their values with Tab,
or install it (--install). The script is generated once, from the options of
this version; Tallyroll itself does not run during completion. Needs the extra:
pip install "tallyroll[completion]".
"""
COMPLETION_EXAMPLES = """\
examples (take effect in new shells):
  tallyroll completion bash --install
  tallyroll completion zsh > ~/functions/_tallyroll   # a folder of $fpath
"""

ENVS_USAGE = "%(prog)s [SYSTEM ...] [options]"
ENVS = """\
List the environment systems that `tallyroll collect SYSTEM:ID` supports: which
are installed, how to install the others, which cannot be installed together,
how episodes end, and where seeds are accepted. The systems are not imported.
Other packages can add systems.
"""
ENVS_EXAMPLES = """\
examples:
  tallyroll envs
  tallyroll envs brax && tallyroll collect brax:ant --frames 1e6 --out ant
  tallyroll envs --json | jq -r '.[] | select(.installed) | .name'

exit status:
  0  all named systems are installed, or none was named
  1  a named system is not installed, or does not exist
"""

DIFF_USAGE = "%(prog)s PATH OTHER [options]"
DIFF = """\
Compare two storages of any format by trajectory and step. The report shows rows
that are in only one storage, and the columns and rows whose bits differ. It
also shows differences in provenance, which do not affect the exit status.
Another process may write to the storages at the same time.
"""
DIFF_EXAMPLES = """\
examples:
  tallyroll diff runs/pole runs/pole.h5
  tallyroll diff runs/all runs/copy --ids relative
  tallyroll diff runs/a runs/b --json | jq .places

exit status:
  0  both storages have the same columns and rows
  1  the storages differ
  2  no comparison: no storage, not readable, or an invalid argument
"""

INFO_USAGE = "%(prog)s [options]"
INFO = """\
Show information for bug reports: the versions of Tallyroll and its
dependencies, whether the C extension was built and loads, the environment
systems that can be imported, the devices, and the limits of this machine. Each
package is imported in a separate process, so a broken package is listed with
its error. Paths of your folders are not shown.
"""
INFO_EXAMPLES = """\
examples:
  tallyroll info
  tallyroll info --json | jq .extension
"""

INSPECT_USAGE = "%(prog)s PATH [PATH ...] [options]"
INSPECT = """\
Show a storage: its columns, runs, number of rows and trajectories, the returns
and lengths of finished episodes (overall, by run, and by the policy version at
the last action), and its first rows. Another process may write to the storage
at the same time. Several storages are shown as one, with the number of rows of
each. For the shards of a run, missing and duplicated shards are listed, and so
are storages that are not shards.
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

PLAN_USAGE = "%(prog)s ENV (--frames N | --episodes E) [options]"
PLAN = """\
Print the execution plan of a run and the disk space of its rows. For each part
that does not take a faster path, the plan gives the reason. Nothing is
collected or written to --out, whose ending selects the format. The options are
those of `tallyroll collect` that affect a new run's plan. The environment is
created and reset, and a policy is called once.
"""
PLAN_EXAMPLES = """\
examples:
  tallyroll plan CartPole-v1 --frames 1e6 --num-envs 8
  tallyroll plan ale:breakout --frames 1e7 --max-size 1e6
  tallyroll plan CartPole-v1 --frames 1e6 --out pole.h5 --json | jq .row_bytes
"""

PROVE_USAGE = "%(prog)s PATH [PATH ...] [options]"
PROVE = """\
Check the runs of an experiment, and print one statement for a reviewer: every
row verified, the stored transitions or episodes compared with the budget, the
ledger, one SHA-256 of the content, trajectories replayed in the environment and
compared bit for bit, and the versions of the packages. If a check
is not possible, the statement gives the reason. Two storages with the same rows
count as a fault. A copy whose sources are given too, such as a merged dataset,
is proved if its sources are, and each of its rows is equal to one of theirs.
"""
PROVE_EXAMPLES = """\
examples:
  tallyroll prove runs/* > proof.txt
  tallyroll prove runs --all
  tallyroll prove merged runs/a runs/b
  tallyroll prove runs --json | jq '.storages[] | {path, verdict, content}'
  tallyroll prove runs --env-factory my_envs:make_pole

exit status:
  0  all runs are proved
  1  a run is refuted: a check found a fault
  2  no fault, but a check was not possible; or an invalid argument
"""

REPLAY_USAGE = "%(prog)s PATH [PATH ...] [options]"
REPLAY = """\
Replay stored trajectories: reset the environment with the seeds and contexts in
their rows, step the stored actions, and compare every observation, reward and
end bit for bit. If rows have no seeds, the whole lane is replayed from the
run's seed. Equality is guaranteed for the same machine and versions; versions
that differ are reported. Copied and packed rows are replayed using the runs
that originally collected them.
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
  0  all replayed trajectories are equal
  1  a trajectory differs; the first difference is shown
  2  nothing differs, but a trajectory could not be replayed; or an invalid
     argument
"""

REPORT_USAGE = "%(prog)s PATH [PATH ...] [options]"
REPORT = """\
Summarize the runs of many storages: requested and stored transitions, ledgers,
returns with intervals over seeds, learning curves, and differences between the
runs. Runs with the same environment and label form a group, and count as its
seeds; runs/ppo-3 and runs/ppo/3 have the label ppo. Folders are searched for
storages. Needs the extra: pip install "tallyroll[report]".
"""
REPORT_EXAMPLES = """\
examples:
  print a table, and write a self-contained page with learning curves:
    tallyroll report runs/* --html report.html
  write a table and a figure for a paper:
    tallyroll report runs/* --latex table.tex --pdf curves.pdf
  compare batch sizes:
    tallyroll report runs --group-by environment,call.frames_per_batch
  combine several environments, with returns scaled to 0 and 1:
    tallyroll report runs --group-by label --scale CartPole-v1=0:500 \\
      --scale Pendulum-v1=-1500:-150
  write CSV or JSON for other programs:
    tallyroll report runs/* --csv > runs.csv
    tallyroll report runs/* --json | jq '.groups[].interquartile_mean'

exit status:
  0  the report covers all runs
  1  a run could not be read or is left out; the rest is reported
  2  invalid argument
"""

VERIFY_USAGE = "%(prog)s PATH [PATH ...] [options]\n       %(prog)s [KIND:]PATH [options]"
VERIFY = """\
Read every row of a storage, and report inconsistencies: counts that
do not match, ids and steps with gaps or repeats, rows after an end, next
observations that differ from the following row's observation, lost final
observations, NaN, rows that were never written, a ledger that does not
balance, or bytes that changed since the storage was finalized. Each finding
names its row. Another process may write to the storage at the same time. For
several storages, the command checks each one, and also that no two hold the
same rows and that no shard of a run is missing. If their columns or formats
differ, each is checked alone, and only missing shards are looked for in all.

The command can also check a dataset of another library, one at a time: counts
against metadata, episodes and their boundaries, indices, timestamps, next
observations, ends, NaN, spaces, video frames against rows, statistics against
data, and missing files. KIND is d4rl, hf, lerobot, minari, npz, parquet, rlds
or torchrl; it can be omitted if the files identify it. Nothing in the dataset
is unpickled or executed.
"""
VERIFY_EXAMPLES = """\
examples:
  tallyroll verify runs/pole
  tallyroll verify runs/pole.h5 --skip nan,zeros
  tallyroll verify runs/pole --json | jq .findings
  tallyroll verify runs/shard-*
  tallyroll verify 'data/*'
  tallyroll verify minari:datasets/pole-v0
  tallyroll verify lerobot:datasets/pusht --skip videos

exit status:
  0  no problems found
  1  the storage or dataset has problems
  2  not checked: no storage, not readable, or an invalid argument
"""

WATCH_USAGE = "%(prog)s PATH [options]"
WATCH = """\
Follow a collection that runs in another process: its rate and the time left,
the returns of its finished episodes, workers, disk space, and the ledger. The
command reads committed rows only, does not disturb the run, and exits when
the run ends. On a terminal, the display is updated in place.
"""
WATCH_EXAMPLES = """\
examples:
  tallyroll watch runs/pole
  tallyroll watch runs/pole --interval 10
  tallyroll watch runs/pole --json | jq -c '[.frames, .rate, .return_mean]'
  tallyroll watch runs/pole --once

exit status:
  0  the run ended, or --once was given
  1  no storage, or not readable
"""
