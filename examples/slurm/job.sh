#!/bin/bash
# Change the next two lines, and the config at the end. Task 0 is the server, the others are trainers (mode: rpc).
# The folder runs/ must be on a file system that all nodes share.
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=4
#SBATCH --time=02:00:00
# Two minutes before the limit every rank gets SIGUSR1: the run writes a checkpoint and ends with exit code 3.
#SBATCH --signal=USR1@120 --requeue --open-mode=append

summary=runs/job-$SLURM_JOB_ID/summary.json
earlier=$(cat "$summary" 2> /dev/null)
# A job that SLURM starts again continues its run. A task that fails does not end the others: the run continues without
# a lost trainer.
srun --kill-on-bad-exit=0 \
    python -m paramserver.launch --config config.yaml --set "logging.name=job-$SLURM_JOB_ID"
code=$?
# The code of srun is the highest of all tasks, also of a lost trainer. How the run ended is in the summary of this turn.
now=$(cat "$summary" 2> /dev/null)
if [[ $now != "$earlier" && $now == *'"status": "interrupted"'* ]]; then
    code=3
elif [[ $now != "$earlier" && $now == *'"status": "completed"'* ]]; then
    code=0
fi
if [[ $code == 3 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
