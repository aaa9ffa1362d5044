#!/usr/bin/env bash
# A real one-node SLURM for tests: slurmctld, slurmd, slurmdbd, MariaDB and munge, with accounting and one pretend GPU.
#
#   eval "$(tests/slurm/cluster.sh up)"    install what is missing, start, set SLURM_CONF and PATH
#   tests/slurm/cluster.sh status          print the same lines and succeed if the cluster answers
#   tests/slurm/cluster.sh down            end every process of it and remove its folder
#
# Needs root and Debian's packages (SLURM 22.05 or newer); no systemd, no cgroups. Everything lies in one private folder
# (SPEEDPROOF_SLURM_DIR, default ${TMPDIR:-/tmp}/speedproof-slurm): key, sockets, database, logs. All ports are free ones
# found at start, bound to loopback where SLURM allows it, so a SLURM, munge or MariaDB already running here is left alone.
#
# What a test finds (sinfo, sacctmgr show assoc):
#   partition main    the default; its jobs preempt those in spare
#   partition spare   preemptable: TERM, five seconds of grace, KILL, back into the queue
#   account   lab     for the calling user and root; qos normal, short; GPU type pretend (File=/dev/null), feature pretend
#   node              8 CPUs and at least 16 GB, whatever the machine has, so that several jobs fit; nothing is enforced
# Time limits are whole minutes; SLURM looks at them, and at the grace time, every 30 s;
# `scontrol update job=N EndTime=now` ends one sooner.
set -euo pipefail

dir=$(realpath -m "${SPEEDPROOF_SLURM_DIR:-${TMPDIR:-/tmp}/speedproof-slurm}")
conf=$dir/etc/slurm.conf
export SLURM_CONF=$conf
export PATH=${PATH//"$dir/bin:"/}:/usr/sbin:/sbin # without the srun of an earlier start
packages=(munge mariadb-server slurm-wlm slurm-client slurmdbd slurm-wlm-mysql-plugin)
daemons='munged|mariadbd|slurmdbd|slurmctld|slurmscriptd|slurmd|slurmstepd'
# A cluster's variables of a surrounding job would steer our own commands.
for name in ${!SLURM_*} ${!SBATCH_*} ${!SRUN_*}; do [ "$name" = SLURM_CONF ] || unset "$name"; done

announce() { printf 'export SLURM_CONF=%s\nexport PATH=%s/bin:$PATH\n' "$conf" "$dir"; }
say() { echo "cluster.sh: $*" >&2; }
fail() { say "$*"; exit 1; }

# ---- packages ------------------------------------------------------------------------------------------------------

install_missing() {
    local missing=() package silenced=
    for package in "${packages[@]}"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    say "installing ${missing[*]}"
    # Without this file the packages would start system services, on the default ports.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        silenced=yes
        trap 'rm -f /usr/sbin/policy-rc.d; take_down' EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}"; } >"$dir/log/apt.log" 2>&1 ||
        { tail -n 5 "$dir/log/apt.log" >&2; fail "packages: apt-get failed on ${missing[*]}; install them by hand"; }
    [ -z "$silenced" ] || rm -f /usr/sbin/policy-rc.d
    trap take_down EXIT
}

# ---- configuration -------------------------------------------------------------------------------------------------

free_port() { # the first free TCP port from $1 on
    local port=$1
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    echo "$port"
}

configure() {
    local host node memory password
    host=$(hostname -s)
    node=node1
    memory=$(awk '/MemTotal/ {m = int($2 / 1024); print (m > 16384 ? m : 16384)}' /proc/meminfo)
    password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    database_port=$(free_port 16806)
    local dbd_port ctld_port slurmd_port
    dbd_port=$(free_port $((database_port + 1)))
    ctld_port=$(free_port $((dbd_port + 1)))
    slurmd_port=$(free_port $((ctld_port + 1)))

    mkdir -p "$dir"/{etc,run,db,state,spool}
    dd if=/dev/urandom of="$dir/etc/munge.key" bs=1024 count=1 status=none
    chmod 0600 "$dir/etc/munge.key"

    cat >"$dir/etc/database.sql" <<END
CREATE DATABASE slurm;
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '$password';
GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';
END

    cat >"$dir/etc/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$dbd_port
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$database_port
StorageUser=slurm
StoragePass=$password
StorageLoc=slurm
LogFile=$dir/log/slurmdbd.log
PidFile=$dir/run/slurmdbd.pid
END
    chmod 0600 "$dir/etc/slurmdbd.conf" "$dir/etc/database.sql"

    cat >"$conf" <<END
ClusterName=speedproof
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
PlugStackConfig=$dir/etc/plugstack.conf
MailProg=/bin/true
MpiDefault=none
ReturnToService=2

# No cgroups and no systemd: processes are followed through /proc, nothing is confined.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd_port
AccountingStoragePass=$dir/run/munge
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/gpu:pretend
AccountingStoreFlags=job_comment

# Quick decisions: look at the queue at once, end a job five seconds after its TERM.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=256
KillWait=5
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 CPUs=8 RealMemory=$memory Gres=gpu:pretend:1 Feature=pretend
PartitionName=main Nodes=$node Default=YES MaxTime=60 DefaultTime=10 PriorityTier=2 PreemptMode=OFF
PartitionName=spare Nodes=$node MaxTime=60 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
END
    echo "Name=gpu Type=pretend File=/dev/null" >"$dir/etc/gres.conf"
    # 22.05 starts without cgroups when this is empty; later releases want to be told.
    : >"$dir/etc/cgroup.conf"
    local version
    version=$(slurmd -V | grep -o '[0-9]*\.[0-9]*' | head -n 1)
    [[ $version < 23.11 ]] || echo "CgroupPlugin=disabled" >"$dir/etc/cgroup.conf"
    : >"$dir/etc/plugstack.conf"
}

# Snakemake's job step drops every SLURM_ variable but a few before it calls srun, SLURM_CONF with them, so that srun would
# look in /etc/slurm. This srun, first on PATH, puts it back.
wrap_srun() {
    mkdir -p "$dir/bin"
    printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$conf" "$(command -v srun)" >"$dir/bin/srun"
    chmod +x "$dir/bin/srun"
}

# ---- life ----------------------------------------------------------------------------------------------------------

wait_for() { # $1 what, then the command that succeeds once it is there
    local what=$1 deadline=$((SECONDS + 60))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || { tail -n 5 "$dir"/log/*.log >&2; fail "$what did not answer within 60 s"; }
        sleep 0.1
    done
}

start() { # a command that should succeed; what it starts must not inherit the lock
    "$@" >"$dir/log/start.log" 2>&1 9>&- || { tail -n 5 "$dir"/log/*.log >&2; fail "$1 did not start"; }
}

database() { mariadb --no-defaults --socket="$dir/run/mariadb" --user=root "$@"; }
answers() { # the node is there, and so are the accounts
    [ -e "$conf" ] && timeout 10 sinfo -h -t idle,mix,alloc,comp -o %n 2>/dev/null | grep -q . &&
        timeout 10 sacct -n -X >/dev/null 2>&1
}

bring_up() {
    mkdir -p "$dir/log"
    install_missing
    configure
    wrap_srun
    start munged --force --socket="$dir/run/munge" --key-file="$dir/etc/munge.key" --pid-file="$dir/run/munged.pid" \
        --seed-file="$dir/state/munge.seed" --log-file="$dir/log/munged.log"
    start mariadb-install-db --no-defaults --user=root --datadir="$dir/db" --skip-test-db \
        --auth-root-authentication-method=normal
    # The database lives as long as the test: no log of its own, and no waiting for the disk.
    setsid mariadbd --no-defaults --user=root --datadir="$dir/db" --socket="$dir/run/mariadb" \
        --pid-file="$dir/run/mariadbd.pid" --bind-address=127.0.0.1 --port="$database_port" \
        --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900 \
        >"$dir/log/mariadbd.log" 2>&1 </dev/null 9>&- &
    wait_for MariaDB database -e 'SELECT 1'
    database <"$dir/etc/database.sql"
    rm "$dir/etc/database.sql"
    start slurmdbd
    wait_for slurmdbd sacctmgr -n list cluster
    start sacctmgr -i add cluster speedproof
    start sacctmgr -i add qos short
    start sacctmgr -i add account lab Cluster=speedproof
    local user
    for user in $(printf '%s\n' root "${SUDO_USER:-root}" | sort -u); do
        start sacctmgr -i add user "$user" Account=lab DefaultAccount=lab QOS=normal,short DefaultQOS=normal
    done
    start slurmctld
    wait_for slurmctld scontrol ping
    start slurmd
    wait_for "the node" answers
}

processes() { # ids of this cluster's daemons, and of what its jobs left running
    local pid
    for pid in $(ps -eo pid=,comm= | awk -v daemons="^($daemons)\$" '$2 ~ daemons {print $1}'); do
        # A daemon is ours if it holds a file of our folder open, be it removed already.
        find "/proc/$pid/fd" "/proc/$pid/cwd" -lname "$dir/*" 2>/dev/null | grep -q . && echo "$pid"
    done
    grep -lszxF "SLURM_CONF=$conf" /proc/[0-9]*/environ | xargs -r grep -lsz '^SLURM_JOB_ID=' | cut -d/ -f3 || true
}

take_down() {
    local pids tries
    # Ask SLURM first: it also finds what a job started with another environment.
    [ ! -e "$conf" ] || timeout 3 scancel --quiet --signal=KILL --full --state=RUNNING >/dev/null 2>&1 || true
    for tries in $(seq 50); do
        mapfile -t pids < <(processes)
        [ ${#pids[@]} -gt 0 ] || break
        # Nothing of this is kept, so nothing needs to end in order.
        kill -KILL "${pids[@]}" 2>/dev/null || true
        sleep 0.1
    done
    rm -rf "$dir"
}

locked() { # one of us at a time; the lock is the folder itself, so that none is left over
    local tries
    for tries in 1 2 3; do
        mkdir -p "$dir"
        exec 9<"$dir"
        flock -w 180 9 || fail "$dir: another start or stop has held it for three minutes; end that first"
        [ "$dir" -ef /proc/self/fd/9 ] && return
    done
    fail "$dir: it vanishes again and again; is another stop running?"
}

case ${1:-} in
up)
    [ "$(id -u)" = 0 ] || fail "up: needs root, runs as $(id -un); use a container, or set up accounting by hand"
    locked
    if ! answers; then
        find "$dir" -mindepth 1 -maxdepth 1 | grep -q . && { take_down; mkdir -p "$dir"; }
        chmod 0755 "$dir"
        trap take_down EXIT
        bring_up
        trap - EXIT
        say "up after $SECONDS s"
    fi
    announce
    ;;
status)
    answers || { say "not up; start it with tests/slurm/cluster.sh up"; exit 1; }
    announce
    ;;
down)
    [ -e "$dir" ] || [ -n "$(processes)" ] || exit 0
    locked
    take_down
    ;;
*)
    fail "expected up, down or status, found '${1:-}'"
    ;;
esac
