"""Configuration of the test cluster: a controller, an accounting daemon, four nodes on this machine."""

from __future__ import annotations

import getpass
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
CPUS = 4  # of each node in Slurm's configuration; the machine's real number does not matter
MEMORY_MB = 4000
GPUS = 4  # links to /dev/null: Slurm allocates them, no job uses them
NAME = "kronscale"


@dataclass(frozen=True)
class Layout:
    """Folder and ports of one cluster."""

    folder: Path
    controller_port: int
    accounting_port: int
    node_ports: tuple[int, ...]

    @classmethod
    def make(cls, folder: Path) -> Layout:
        """Choose free ports."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2 + len(NODES))]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            controller, accounting, *nodes = (one.getsockname()[1] for one in sockets)
        return cls(folder, controller, accounting, tuple(nodes))

    @property
    def slurm_conf(self) -> Path:
        """Value of SLURM_CONF for commands on this cluster."""
        return self.folder / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """Socket of the credential daemon."""
        return self.folder / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """The only address of the database, in a folder that only its user may enter."""
        return self.folder / "database" / "mysql.socket"

    def write(self) -> None:
        """Write the configuration files and make the folders that they name."""
        self.folder.chmod(0o711)  # munged insists that everyone can reach its socket
        for name in ("state", "log", "database", "gpus", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        for number in range(GPUS):
            (self.folder / "gpus" / f"gpu{number}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpus/gpu[0-{GPUS - 1}]\n")
        self.slurm_conf.write_text(self._slurm_conf())
        accounting = self.folder / "slurmdbd.conf"
        accounting.write_text(self._slurmdbd_conf())
        accounting.chmod(0o600)  # slurmdbd refuses anything looser

    def _slurm_conf(self) -> str:
        user, host = getpass.getuser(), socket.gethostname()
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={CPUS} "
            f"RealMemory={MEMORY_MB} Gres=gpu:{GPUS}"
            for node, port in zip(NODES, self.node_ports, strict=True)
        )
        return f"""\
ClusterName={NAME}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={self.controller_port}
AuthType=auth/munge
AuthInfo=socket={self.munge_socket},cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# Jobs start at once: tests wait for them.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1,sched_min_interval=100000
MaxArraySize=1001
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A node that does not answer is down within seconds, and back as soon as it answers.
SlurmdTimeout=6
ReturnToService=2
KillWait=5
MessageTimeout=5
InactiveLimit=0
Waittime=0
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={self.accounting_port}
AccountingStoragePass={self.munge_socket}
AccountingStoreFlags=job_comment
{nodes}
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=60 DefaultTime=10 PriorityTier=1 State=UP
PartitionName=urgent Nodes=n[1-4] MaxTime=60 DefaultTime=10 PriorityTier=10 PreemptMode=OFF State=UP
"""

    def _slurmdbd_conf(self) -> str:
        return f"""\
AuthType=auth/munge
AuthInfo=socket={self.munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self.accounting_port}
SlurmUser={getpass.getuser()}
PidFile={self.folder}/slurmdbd.pid
LogFile={self.folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={getpass.getuser()}
StorageLoc=slurm_accounting
"""
