#!/usr/bin/env bash
# The whole graph inside one allocation, one measurement after another, with Snakemake's local executor:
#
#   make allocation CONFIG="config/gh200.yaml site.yaml"            asks for it as `slurm:` in the config says
#   sbatch --gpus=1 --time=240 … profiles/allocation/job.sh --configfile config/gh200.yaml -- all
#   profiles/allocation/job.sh --budget-minutes 30 -- all           the same on a machine without a scheduler
#
# It stops in time: after --budget-minutes, or when SLURM says that the end is near, nothing new is started, the step that
# runs is told to stop (training saves its state first), and what is left is listed. Running it again goes on from there.
#SBATCH --job-name=speedproof
#SBATCH --output=logs/allocation-%j.log
#SBATCH --signal=B:TERM@180
set -uo pipefail

budget=
if [ "${1:-}" = --budget-minutes ]; then
    budget=$(awk -v minutes="$2" 'BEGIN { printf "%d", 60 * minutes }') || exit 2
    [ "$budget" -gt 0 ] || { echo "budget-minutes: found '$2'; give a number of minutes above 0" >&2; exit 2; }
    shift 2
fi
[ -f Snakefile ] || cd "$(dirname "$0")/../.." || exit 2
. envs/node-env.sh
export SPEEDPROOF_ALLOCATION=${SLURM_JOB_ID:-here}
# Snakemake's own reading of these would be that of a job it submitted.
cores=${SLURM_CPUS_PER_TASK:-all}

stopped=
stop() {
    [ -z "$stopped" ] || return
    stopped="stopped in time, since $1"
    kill_at=$((SECONDS + 150))
    echo "allocation: $1; starting nothing new, and stopping what runs"
    # INT and not TERM, on which Snakemake 9 can lock itself up. It waits for the steps that run.
    kill -INT "$graph" 2>/dev/null
    # The steps themselves, not the shells around them: those would die at once and not wait for a state to be saved.
    pkill -TERM --pgroup "$graph" --full '^python[0-9.]* src/scripts/'
}
trap 'stop "SLURM ends this job soon"' TERM
trap 'stop "it was interrupted"' INT

set -m # a process group of its own for the graph, which would not hear INT otherwise
snakemake --executor local --cores "$cores" --resources gpu=1 --keep-going "$@" &
graph=$!
set +m
while kill -0 "$graph" 2>/dev/null; do
    sleep 1 &
    wait $! # unlike a plain sleep, it ends when a signal comes
    [ -z "$budget" ] || [ $SECONDS -lt "$budget" ] || stop "its budget is used up"
    [ -z "$stopped" ] || [ $SECONDS -lt $kill_at ] || kill -KILL -- "-$graph"
done
wait "$graph"
code=$?

# The compiler caches stayed warm from step to step; now they go, as at the end of any job.
[ -z "${SLURM_JOB_ID:-}" ] || rm -rf "${TMPDIR:-/tmp}/speedproof-$(id -un)/$SLURM_JOB_ID"

left=$(snakemake --dry-run --cores 1 --nolock "$@" 2>&1)
case $left in
*"Nothing to be done"*) echo "allocation: all is done" ;;
*)
    echo "allocation: ${stopped:-some steps failed, see above}; left to do, run it again to go on:"
    sed -n '/^Job stats:/,/^total/p; /^total/q' <<<"$left"
    ;;
esac
[ -n "$stopped" ] || exit "$code"
