"""NVIDIA GPUs that a host seems to have: the driver's files, and device files that lead nowhere."""

from __future__ import annotations

from tests.kit.cluster.host import Host

KEPT = ("null", "zero", "full", "random", "urandom", "tty")
"""What every process may count on in ``/dev``."""

# The machine's /dev is the hosts' own, so it is covered, not changed. A host has the files until it ends.
_SCRIPT = """
[ -e /proc/driver/nvidia ] && exit
dev=/run/dev
mkdir $dev
mount -t tmpfs tmpfs $dev
for name in {kept}; do touch $dev/$name; mount --bind /dev/$name $dev/$name; done
for name in shm pts mqueue; do
    [ -d /dev/$name ] || continue
    mkdir $dev/$name
    mount --rbind /dev/$name $dev/$name
done
ln -s /proc/self/fd $dev/fd
for fd in stdin:0 stdout:1 stderr:2; do ln -s /proc/self/fd/${{fd#*:}} $dev/${{fd%:*}}; done
ln -s pts/ptmx $dev/ptmx
mount -t tmpfs tmpfs /proc/driver
for number in {numbers}; do
    mknod $dev/nvidia$number c 1 3
    folder=/proc/driver/nvidia/gpus/0000:0$number:00.0
    mkdir -p $folder
    printf 'Model: \\t\\t Fake\\nDevice Minor: \\t %s\\n' $number > $folder/information
done
echo 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15' > /proc/driver/nvidia/version
mount --rbind $dev /dev
"""


def show_gpus(host: Host, count: int) -> None:
    """Let all that runs on the host from now on see so many GPUs, as long as it is up."""
    numbers = " ".join(map(str, range(count)))
    host.run(["sh", "-ec", _SCRIPT.format(kept=" ".join(KEPT), numbers=numbers)], cwd="/", check=True)
