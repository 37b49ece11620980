"""Starts the ranks of an attempt, notices the first death, ends the rest, and says which was the cause.

A rank is started in one of three ways, and watched and ended in one:

    watching.py        the loop: waits for a death, a time limit, a request; how ranks ended
    local.py           processes of this host, or of MPICH's mpiexec on this host
    srun.py            a step of a Slurm job
    wrapper.py         parent of each rank under mpiexec and srun; writes how the rank ended
    parent_death.py    has local processes die with their supervisor
    environment.py     variables that ranks get, and those that they must not inherit
    outcome.py         the lost rank and the cause, in one sentence; state of the attempt
"""
