#!/usr/bin/env bash
# One run in 8 shards, as an array of Slurm jobs that may be killed at any time:
#
#     sbatch examples/cluster/shards_slurm.sh                                     # from any folder
#     sbatch examples/cluster/shards_slurm.sh --frames 5e6 --policy my:policy     # options come last, and win
#     SLURM_ARRAY_TASK_ID=0 bash examples/cluster/shards_slurm.sh                 # one of them, without Slurm
#
# Each job collects its lanes' part of the transitions into a storage of its own, RUNS/part-I. Its
# command is the same each time: what was preempted, or lost its node, goes on after its last commit,
# and all shards together are exactly --frames transitions. The number of shards stands here, and not
# in SLURM_ARRAY_TASK_COUNT, so that single ones can be queued again: sbatch --array=3,5 …
#
# The last of them waits for the others, checks that all are complete, and unites them in RUNS/all; where
# its time is up before they are, it names what is missing, and goes on when it is queued again.
#SBATCH --job-name=shards
#SBATCH --array=0-7
#SBATCH --time=01:00:00
#SBATCH --cpus-per-task=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%a.txt
#SBATCH --signal=B:USR1@120
set -euo pipefail

shards=${SHARDS:-8} task=${SLURM_ARRAY_TASK_ID-} runs=${RUNS:-runs}
if [[ ! $task =~ ^[0-9]+$ ]]; then
    echo "SLURM_ARRAY_TASK_ID: expected the number of a shard, from 0 on, got '$task'" >&2
    exit 2
fi

# Slurm signals this script alone, by SIGTERM before it takes the machine away, and by SIGUSR1 two
# minutes before the limit: the command commits what is complete, and ends. After a preemption Slurm
# queues the job again itself.
job='' told='' again=''
tell() {
    told=1
    if [[ $job ]]; then kill -TERM "$job" || true; fi
}
trap tell TERM
trap 'again=1; tell' USR1

status=0
run() {  # run COMMAND...: the status it ends with, and what signals say is said to it
    local before=$told
    "$@" &
    job=$!
    if [[ $before ]]; then tell; fi  # it came before there was a job
    told=1
    while [[ $told ]]; do  # a signal ends `wait`, and not the job
        told='' status=0
        wait "$job" || status=$?
    done
}

mkdir -p "$runs"
run tallyroll collect CartPole-v1 --frames 1e6 --num-envs 64 --seed 0 --shard "$task/$shards" --resume \
    --out "$runs/part-$task" --quiet "$@"
if ((status == 0 && task == shards - 1)) && [[ ! -e $runs/all ]]; then
    run tallyroll merge "$runs/all" "$runs/part-*" --shards "$shards" --wait --timeout "${WAIT:-86400}"
fi
if [[ $again ]] && ((status)); then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$task"
fi
exit "$status"
