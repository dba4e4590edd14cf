#!/usr/bin/env bash
# One run in 8 shards, as an array of Slurm jobs that may be killed at any time:
#
#     sbatch examples/cluster/shards_slurm.sh                                     # from any folder
#     sbatch examples/cluster/shards_slurm.sh --frames 5e6 --policy my:policy     # options override those below
#     SLURM_ARRAY_TASK_ID=0 bash examples/cluster/shards_slurm.sh                 # one job, without Slurm
#
# Each job collects the transitions of its lanes into its own storage, RUNS/part-I. Its command is the
# same each time: a job that was preempted, or whose node failed, resumes after its last commit, and all
# shards together have exactly --frames transitions. The number of shards is set here, and not read from
# SLURM_ARRAY_TASK_COUNT, so that you can requeue single shards: sbatch --array=3,5 …
#
# The last job waits for the others, checks that all shards are complete, and merges them into RUNS/all.
# If its time limit comes first, it lists the missing shards, and resumes when it is queued again.
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

# Slurm signals only this script: SIGTERM before it takes the machine away, and SIGUSR1 two minutes
# before the time limit. The command then commits the complete transitions and ends. After a preemption
# Slurm itself requeues the job.
job='' told='' again=''
tell() {
    told=1
    if [[ $job ]]; then kill -TERM "$job" || true; fi
}
trap tell TERM
trap 'again=1; tell' USR1

status=0
run() {  # run COMMAND...: forward signals to the command, and set `status` to its exit status
    local before=$told
    "$@" &
    job=$!
    if [[ $before ]]; then tell; fi  # a signal arrived before the job was started
    told=1
    while [[ $told ]]; do  # a signal ends `wait`, but not the job
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
